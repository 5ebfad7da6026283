"""The operations as Triton kernels, for NVIDIA GPUs: a file that launches and a file of kernels for
each."""
