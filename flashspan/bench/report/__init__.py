"""What is made of measured rows: tables, plots, findings, pages."""
