"""Plain-torch references of the operations that a GPU will want its own kernels for."""
