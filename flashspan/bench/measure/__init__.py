"""Measuring: clocks, memory, traces, and the row that records a measurement."""
