"""Compile and launch kernels: a launch as data (launch.py), and its repetition (replay.py)."""
