"""Launches and compiles the Triton kernels."""
