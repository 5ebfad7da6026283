"""Names what Triton compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def watch_compilations() -> Callable[[], list[str]]:
    """From now on; the result returns the kernels that were compiled since, each as
    `describe_source` writes it. Those that the cache on disk holds are not."""
    try:
        from triton import knobs
    except ImportError:
        return list
    compiled: list[str] = []
    before = knobs.compilation.listener

    def note(*, cache_hit: bool = False, src: Any = None, **about: Any) -> None:
        if not cache_hit:
            compiled.append(describe_source(src))
        if before is not None:  # several may watch
            before(cache_hit=cache_hit, src=src, **about)

    knobs.compilation.listener = note
    return lambda: list(compiled)


def describe_source(source: Any) -> str:
    """A kernel and all that selects this version of it, as in `copy_kernel(x: *fp32 / 16, n: i32,
    BLOCK=1024)`: "/ 16" where an argument is known to be a multiple of 16."""
    constants = getattr(source, "constants", {})
    attributes = getattr(source, "attrs", {})
    words = []
    for number, (name, kind) in enumerate(getattr(source, "signature", {}).items()):
        if (number,) in constants:
            words.append(f"{name}={constants[(number,)]}")
        else:
            known = any(what == "tt.divisibility" for what, _ in attributes.get((number,), ()))
            words.append(f"{name}: {kind}{' / 16' if known else ''}")
    return f"{getattr(source, 'name', source)}({', '.join(words)})"
