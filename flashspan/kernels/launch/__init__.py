"""How kernels are compiled and launched: a launch as data (launch.py), and its repetition (replay.py)."""
