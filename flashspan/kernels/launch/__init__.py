"""How kernels are launched: a launch as data (launch.py)."""
