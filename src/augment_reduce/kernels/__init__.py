"""Kernels: `reference` in plain torch, the oracle; `cpu` compiled by Numba, kept on disk by `cache`."""
