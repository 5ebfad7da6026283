"""Kernels in C for a CPU: small batches, whose operations in torch take longer than what they
compute."""
