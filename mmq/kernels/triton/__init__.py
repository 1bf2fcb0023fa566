"""Triton kernels for CUDA and ROCm, bit-equal to the references."""
