"""The CPU backend: Numba kernels for sparse and dense rows, and the functions in front of them (backend.py)."""
