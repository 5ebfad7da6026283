"""Forward and backward of a step as a CUDA graph, for batches so small that launching their kernels
takes longer than running them."""
