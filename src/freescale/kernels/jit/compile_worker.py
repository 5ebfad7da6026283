"""The worker process of `jit.compile`: compiles one version of a kernel after another.

Imports no torch, which takes longer than compiling a kernel.
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

# Triton versions whose private interfaces are as `launch`, `compile` and this module expect. With
# any other version, Triton itself compiles and launches.
KNOWN = ((3, 6), (3, 7), (3, 8), (3, 9))


@cache
def read_version() -> tuple[int, ...]:
    """Triton's version, major and minor."""
    import triton

    return tuple(int(part) for part in str(triton.__version__).split(".")[:2])


def is_known() -> bool:
    """Whether Triton's private interfaces are known."""
    return read_version() in KNOWN


@cache
def compute_keys(module: str) -> None:
    """Makes Triton compute the cache keys of a module's kernels, callees first: Triton's key of a
    kernel contains the constants of a callee only if the callee's own key was computed earlier.
    Without a fixed order, processes do not find each other's versions in the cache."""
    from triton import JITFunction

    for kernel in list(vars(importlib.import_module(module)).values()):
        if isinstance(kernel, JITFunction):
            if kernel.fn.__module__ != module:
                compute_keys(kernel.fn.__module__)
            _ = kernel.cache_key


@dataclass(frozen=True)
class Version:
    """A kernel as Triton compiles it: everything that determines the machine code."""

    module: str
    name: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: tuple[Any, ...]

    def build_source(self) -> Any:
        from triton.compiler import ASTSource

        compute_keys(self.module)
        kernel = getattr(importlib.import_module(self.module), self.name)
        return ASTSource(kernel, self.signature, self.constants, self.attributes)

    def compile(self) -> None:
        """Compiles this version, unless it is in the cache."""
        import triton
        from triton.backends.compiler import GPUTarget

        source = self.build_source()
        kernel = triton.compile(source, target=GPUTarget(*self.target), options=self.options)
        if read_version() == (3, 6):
            # this Triton also compiles C code for each signature, when it is first needed
            from triton.backends.nvidia.driver import CudaLauncher

            with suppress(Exception):  # builds the module, but needs a GPU to use it
                CudaLauncher(source, kernel.metadata)

    def is_cached(self) -> bool:
        """Whether this version is in Triton's cache folder."""
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend
        from triton.runtime.cache import get_cache_key, get_cache_manager

        source, backend = self.build_source(), make_backend(GPUTarget(*self.target))
        options = backend.parse_options(dict(self.options))
        key = get_cache_key(source, backend, options, get_cache_invalidating_env_vars())
        folder = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        file = f"{source.name[:150]}.json"
        return file in (folder.get_group(file) or {})


def main() -> None:
    """Compiles the versions from stdin, and prints a line after each."""
    for version in pickle.load(sys.stdin.buffer):
        version.compile()
        print(version.name, flush=True)


if __name__ == "__main__":
    main()
