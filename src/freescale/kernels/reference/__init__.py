"""The operations in plain torch: for CPUs, and what the Triton kernels are tested against."""
