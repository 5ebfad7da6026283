"""Compiles recorded launches before they are needed, in parallel.

A few worker processes compile the versions into Triton's cache folder, where other processes and
other runs find them.
"""

from __future__ import annotations

import os
import pickle
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from freescale import kernels
from freescale.file_lock import lock
from freescale.kernels.jit import compile_worker
from freescale.kernels.jit.compile_worker import Version, is_known
from freescale.kernels.jit.launch import (
    Launch,
    describe_block,
    identify_launch,
    prepare_launch,
    record_launches,
)

MOST_WORKERS = 16
Report = Callable[[int, int], None]  # (compiled, to be compiled)


def find_versions(launches: Iterable[Launch], target: tuple[Any, ...]) -> list[Version]:
    """The distinct versions that these launches need, for a GPU as `read_target` describes it."""
    found = (_specialise(launch, target) for launch in launches)
    return list({repr(version): version for version in found}.values())


def compile_recorded(run: Callable[[], None], report: Report = lambda done, all: None) -> int:
    """Compiles and loads, on the current GPU, all kernels that `run` launches, without a launch:
    their outputs are uninitialised. Returns how many kernels the worker processes compiled; the
    others were in Triton's cache folder. On unknown Triton versions this process compiles one by
    one."""
    with record_launches() as recorded:
        run()
    launches = list({identify_launch(launch): launch for launch in recorded}.values())
    count = compile_versions(find_versions(launches, read_target()), report) if is_known() else 0
    for launch in launches:
        prepare_launch(launch)
    return count


def preload() -> None:
    """Imports Triton and all kernels, and computes their keys in its cache folder. Afterwards the
    process can be forked. Needs no GPU; does nothing on unknown Triton versions."""
    if not is_known():
        return
    from triton.compiler import code_generator  # noqa: F401 - imported when a kernel is looked up
    from triton.runtime.cache import triton_key
    from triton.tools import tensor_descriptor  # noqa: F401 - imported with the first descriptor

    triton_key()
    for name in list_kernel_modules():
        import_module(name)
        compile_worker.compute_keys(name)


def list_kernel_modules() -> list[str]:
    """The modules of Triton kernels of all operations."""
    modules = pkgutil.walk_packages(kernels.__path__, kernels.__name__ + ".")
    return [module.name for module in modules if module.name.endswith("_kernels")]


def read_target() -> tuple[Any, ...]:
    """The current GPU, as Triton describes its target."""
    from triton.runtime.driver import driver

    target = driver.active.get_current_target()
    return target.backend, target.arch, target.warp_size


def _specialise(launch: Launch, target: tuple[Any, ...]) -> Version:
    """Specialises a launch as Triton does."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, backend = launch.kernel, make_backend(GPUTarget(*target))
    options = {**launch.options, "debug": kernel.debug or knobs.runtime.debug}
    for name in ("instrumentation_mode", "fpsan_homomorphic_casts"):  # the second: Triton 3.9
        if hasattr(knobs.compilation, name):
            options[name] = getattr(knobs.compilation, name)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, left = bind(*map(describe_block, launch.values), **options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, specialization, left
    )
    module, name = kernel.fn.__module__, kernel.fn.__name__
    parsed_options = dict(parsed.__dict__)
    return Version(module, name, signature, constants, attributes, parsed_options, target)


def compile_versions(
    versions: Sequence[Version],
    report: Report = lambda done, all: None,
    workers: int | None = None,
) -> int:
    """Compiles the versions that are missing in Triton's cache folder, in worker processes (None:
    as many as processors, up to MOST_WORKERS), and returns how many. `report` is called with
    (compiled, to be compiled) at the start and after each version, if any is missing. RuntimeError
    if one does not compile."""
    if all(version.is_cached() for version in versions):
        return 0
    with _lock_cache():  # the ranks of a machine need the same versions
        missing = [version for version in versions if not version.is_cached()]
        if missing:
            _compile(missing, report, workers)
        return len(missing)


@contextmanager
def _lock_cache() -> Iterator[None]:
    """Keeps other processes from compiling into Triton's cache folder this way inside the block."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "freescale.lock", "w") as file:
        lock(file.fileno())
        yield


def _compile(missing: Sequence[Version], report: Report, workers: int | None) -> None:
    report(0, len(missing))
    count = min(len(missing), workers or min(MOST_WORKERS, len(os.sched_getaffinity(0))))
    results: SimpleQueue[None | Exception] = SimpleQueue()

    def work(part: Sequence[Version]) -> None:
        try:
            _run_worker(part, lambda: results.put(None))
        except Exception as error:
            results.put(error)

    with ThreadPoolExecutor(count) as pool:  # a thread for each worker, to read its output
        for first in range(count):
            pool.submit(work, missing[first::count])
        for done in range(1, len(missing) + 1):
            error = results.get()
            if error is not None:
                raise error
            report(done, len(missing))


def _run_worker(versions: Sequence[Version], count_one: Callable[[], None]) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command, pipe = [sys.executable, "-m", compile_worker.__name__], subprocess.PIPE
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, env=environ) as worker,
    ):
        assert worker.stdin is not None and worker.stdout is not None
        with suppress(BrokenPipeError):  # the worker's own message is clearer
            worker.stdin.write(pickle.dumps(list(versions)))
            worker.stdin.close()
        for _ in worker.stdout:
            count_one()
        if worker.wait():
            errors.seek(0)
            names = ", ".join(sorted({version.name for version in versions}))
            text = errors.read().decode(errors="replace")[-2000:]
            raise RuntimeError(f"a kernel of {names} does not compile: {text}")
