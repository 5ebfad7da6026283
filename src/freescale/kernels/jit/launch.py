"""Launches of Triton kernels: cheap ones, on the right device, or recorded instead of executed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from freescale.kernels.jit.compile_worker import compute_keys, is_known
from freescale.kernels.jit.launch_plan import (
    Block,
    Compiled,
    LaunchPlan,
    Shortcut,
    write_fit_function,
)

_NOTHING = nullcontext()
# Default options. Triton 3.9 warns without this one, and 3.10 changes its default.
_OPTIONS = {"enable_fp_fusion": True}


def require_gpu(device: torch.device, instead: str) -> None:
    """Raises ValueError for tensors that the kernels cannot read; `instead`: the module to use."""
    if device.type != "cuda" and not is_interpreted() and not is_recording():
        raise ValueError(f"the Triton kernels need tensors on a GPU, not {device}; use {instead}")


@cache
def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU. Kernels never change their mode."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def use_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device the current one, on which Triton launches."""
    if not _is_cuda(device) or device.index == _get_current_device():
        return _NOTHING
    return torch.cuda.device(device)


@cache
def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"  # cached: torch creates a string for each access


def _get_current_device() -> int:
    """torch.cuda.current_device without its initialisation: the process has a tensor on a GPU."""
    calls: Any = torch._C  # not in torch's stubs
    number: int = calls._cuda_getDevice()
    return number


def count_blocks(items: int, each: int) -> int:
    """The number of blocks of `each` items that hold `items`."""
    return -(-items // each)


def round_up_to_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True)
class RowLaunch:
    """The launch configuration of a kernel over rows."""

    elements: int  # of a program's tile, for each tensor that it reads or writes
    warps: int
    fewest_columns: int = 1

    def shape(self, width: int) -> dict[str, int]:
        """The arguments of a launch over rows of this width: tiles of R rows and W columns."""
        columns = max(self.fewest_columns, round_up_to_power_of_two(width))
        rows = max(1, self.elements // columns)
        return {"WIDTH": width, "R": rows, "W": columns, "num_warps": self.warps}


class KernelModule:
    """A module of Triton kernels, imported at their first use: Triton takes long, or is missing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(import_module(self._name), name)
        setattr(self, name, kernel)  # found without this function from now on
        return kernel


@dataclass(frozen=True)
class Launch:
    """A recorded launch."""

    kernel: Any
    values: tuple[Any, ...]  # in the order of the kernel's parameters
    options: dict[str, Any]  # num_warps and the like


class _Recording(threading.local):
    """The launches that a thread has recorded; None: it does not record."""

    launches: list[Launch] | None = None


_launchers: dict[int, _Launcher] = {}  # by the kernel's id: kernels live as long as their modules
_recording = _Recording()


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Records this thread's launches inside the block instead of executing them. Outputs are
    uninitialised. Backward runs in this thread too; other threads launch as usual."""
    outer, recording = _recording.launches, list[Launch]()
    _recording.launches = recording
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield recording
    finally:
        _recording.launches = outer


def is_recording() -> bool:
    """Whether this thread records launches. Its tensors may then be on any device."""
    return _recording.launches is not None


def launch_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """`kernel[grid](*arguments, **named)` at a fraction of its cost: Triton binds, specialises and
    looks up each launch anew. This keeps the compiled kernel for each combination of constants,
    dtypes and alignments, and passes it the pointers. Tensors that are read by blocks are passed as
    `Block`. All arguments are on the current device."""
    _find_launcher(kernel)(grid, arguments, named)


def launch_blocks(
    kernel: Any, device: torch.device, items: int, block: int, *arguments: Any, **named: Any
) -> None:
    """Launches one program for each `block` of items on a device, and nothing without items."""
    if items:
        with use_device(device):
            launch_kernel(kernel, (count_blocks(items, block),), *arguments, **named)


def prepare_launch(launch: Launch) -> None:
    """Compiles or loads what a recorded launch needs, on the current device."""
    _find_launcher(launch.kernel).prepare(launch.values, launch.options)


def identify_launch(launch: Launch) -> tuple[Any, ...]:
    """A key that differs between launches of different compiled versions."""
    return id(launch.kernel), *_find_launcher(launch.kernel).identify(launch.values, launch.options)


def _find_launcher(kernel: Any) -> _Launcher:
    launcher = _launchers.get(id(kernel))
    if launcher is None:
        launcher = _launchers[id(kernel)] = _Launcher(kernel)
    return launcher


class _Launcher:
    """The compiled versions of one kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.plans = kernel, dict[tuple[type, ...], LaunchPlan]()
        # By constants and options; None: no shortcut is possible. Kernels with other named
        # arguments have no shortcuts: there would be one for each value.
        self.shortcuts = dict[tuple[Any, ...], Shortcut | None]()
        self.takes_shortcuts = True
        self.direct = not is_interpreted() and is_known()
        self.names = tuple(kernel.arg_names)
        self._hooks: Any = None
        if self.direct:
            from triton import knobs

            self._hooks = knobs
            compute_keys(kernel.fn.__module__)

    def __call__(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        recording = _recording.launches
        if recording is not None:
            values, options = self._bind(arguments, named)
            recording.append(Launch(self.kernel, tuple(values), options))
        elif not self.direct or self._is_watched():
            self._launch_by_triton(grid, arguments, named)
        else:
            self._launch_compiled(grid, arguments, named)

    def _is_watched(self) -> bool:
        """Whether Triton reports launches, for example to its profiler."""
        runtime = self._hooks.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        watches = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
        return bool(self.kernel.pre_run_hooks or watches)

    def _bind(
        self, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """(the values of all parameters, options)."""
        options = _OPTIONS | named
        return [*arguments, *[options.pop(name) for name in self.names[len(arguments) :]]], options

    def _launch_compiled(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        device, shortcut = _get_current_device(), None
        if self.takes_shortcuts:
            shortcut = self.shortcuts.get(tuple(named.items()))
            if shortcut is not None and shortcut.device == device:
                fitting = shortcut.fit(arguments)
                if fitting is not None:
                    _run(device, grid, shortcut.compiled, fitting)
                    return
        values, options = self._bind(arguments, named)
        plan = self._find_plan(values)
        key, passed = plan.build_key(device, options, values)
        compiled = plan.compiled.get(key)
        if compiled is None:
            plan.keep(key, self._launch_by_triton(grid, arguments, named))
            return
        if self.takes_shortcuts and shortcut is None:
            self._add_shortcut(device, compiled, named, values, len(arguments))
        _run(device, grid, compiled, passed)

    def _add_shortcut(
        self, device: int, compiled: Compiled, named: dict[str, Any], values: list[Any], count: int
    ) -> None:
        """Adds a shortcut for launches like this one, with `count` positional arguments."""
        parameters, fixed = self.kernel.params, tuple(named.items())
        self.takes_shortcuts = all(parameter.is_constexpr for parameter in parameters[count:])
        if self.takes_shortcuts and fixed not in self.shortcuts:
            fit = write_fit_function(parameters, values[:count], values[count:])
            self.shortcuts[fixed] = None if fit is None else Shortcut(device, compiled, fit)

    def _find_plan(self, values: Sequence[Any]) -> LaunchPlan:
        types = tuple(map(type, values))
        plan = self.plans.get(types)
        if plan is None:
            plan = self.plans[types] = LaunchPlan(self.kernel.params, types)
        return plan

    def identify(self, values: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """The types of a launch's values, and its key without the device."""
        key, _ = self._find_plan(values).build_key(0, options, values)
        return tuple(map(type, values)), key

    def prepare(self, values: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compiles or loads the version for a launch, without launching it."""
        compiled = self.kernel.run(*map(describe_block, values), grid=(1,), warmup=True, **options)
        if self.direct:
            _ = compiled.run  # loads the kernel
            plan = self._find_plan(values)
            key, _ = plan.build_key(torch.cuda.current_device(), options, values)
            plan.keep(key, compiled)

    def _launch_by_triton(
        self, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        described = {name: describe_block(value) for name, value in named.items()}
        return self.kernel[grid](*map(describe_block, arguments), **_OPTIONS | described)


def _run(device: int, grid: tuple[int, ...], compiled: Compiled, passed: Sequence[Any]) -> None:
    """Launches a compiled kernel on the current stream."""
    stream, (run, function, metadata) = torch._C._cuda_getCurrentRawStream(device), compiled
    width, height, depth = (*grid, 1, 1)[:3]
    run(width, height, depth, stream, function, metadata, None, None, None, *passed)


def describe_block(value: Any) -> Any:
    """Triton's descriptor for a `Block`; any other value unchanged."""
    if not isinstance(value, Block):
        return value
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(value.base, value.shape, value.strides, value.block_shape)
