"""The head's step in Triton kernels: `step` offers what `nn/_step.py` does; its parts are a file each."""
