"""How things are measured: clocks, memory, traces, and the row that each measurement is kept in."""
