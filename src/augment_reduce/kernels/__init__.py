"""Kernels: `reference` in plain torch, the oracle; `_cpu_*` compiled by Numba (kept on disk by `cache`); `_cuda_*` by
Triton."""
