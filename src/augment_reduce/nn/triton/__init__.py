"""The head's step in Triton kernels: `step` has the interface of `nn/_step.py`; its kernels are in the other files."""
