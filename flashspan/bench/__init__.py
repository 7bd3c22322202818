"""Benchmarks: measure/ has the instruments, suites/ one file a benchmark, report/ the tables, plots and pages."""
