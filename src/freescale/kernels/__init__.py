"""The operations that have more than one version, a folder each: `reference` in plain torch defines
the result, `triton` launches `triton_kernels` on a GPU, `native` is C for small batches on a CPU.

`dispatch` chooses between them. The folders import nothing by themselves: processes that compile
kernels import the kernels without torch.
"""
