"""Operations with more than one version, a folder each.

`reference` defines the result in plain torch, `triton` launches the `triton_kernels` on a GPU, and
`native` is C for small batches on a CPU. `dispatch` chooses between them. The folders' `__init__`
files import nothing: processes that compile kernels import the kernels without torch.
"""
