"""Triton kernels, one file a family; imported on the first CUDA call, never with the package."""
