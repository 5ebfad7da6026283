"""Launches that need not be looked up, without a GPU: the compiled kernel only notes its call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from freescale.kernels.id_map.triton_kernels import find_kernel
from freescale.kernels.jit import launch
from freescale.kernels.jit.launch_plan import LIMIT, write_fit_function
from freescale.kernels.row_updates.triton_kernels import sgd_kernel

BLOCK = 64


@pytest.fixture
def launcher(monkeypatch):
    """The calls so far: of Triton's own launch, and of compiled versions by their number."""
    calls = SimpleNamespace(by_triton=[], compiled=[])

    def compile_and_launch(self, grid, arguments, named):
        number = len(calls.by_triton)
        calls.by_triton.append(arguments)
        return SimpleNamespace(
            run=lambda *handed: calls.compiled.append((number, handed)),
            function=number,
            packed_metadata=(),
        )

    monkeypatch.setattr(launch, "is_known", lambda: True)
    monkeypatch.setattr(launch, "_get_current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(launch._Launcher, "_launch_by_triton", compile_and_launch)
    monkeypatch.setattr(launch, "_launchers", {})
    return calls


def make_arguments(**others):
    arguments = {
        "words": torch.zeros(64, dtype=torch.int32),
        "ids": torch.zeros(64, dtype=torch.int64),
        "keys": torch.zeros(64, dtype=torch.int64),
        "found": torch.zeros(64, dtype=torch.int64),
        **dict.fromkeys(("n", "absent", "first_shard", "bits", "rows", "buckets", "row_bits"), 5),
    }
    return tuple((arguments | others).values())


def run(arguments, grid=(3,), **named):
    launch.launch_kernel(find_kernel, grid, *arguments, **{"BLOCK": BLOCK, "num_warps": 4, **named})


def get_shortcuts():
    return launch._find_launcher(find_kernel).shortcuts


def test_what_is_handed_over_is_the_same_by_a_shortcut(launcher):
    arguments = make_arguments()
    for _ in range(3):
        run(arguments)
    assert len(launcher.by_triton) == 1 and len(get_shortcuts()) == 1
    plain, short = (handed for _, handed in launcher.compiled)
    assert plain == short
    addresses = tuple(value.data_ptr() for value in arguments[:4])
    assert short == (3, 1, 1, 7, 0, (), None, None, None, *addresses, *[5] * 7, BLOCK)


@pytest.mark.parametrize(
    "others",
    [
        {"ids": torch.zeros(64, dtype=torch.int32)},
        {"ids": torch.zeros(65, dtype=torch.int64)[1:]},
        {"n": LIMIT},
        {"n": -LIMIT - 1},
        {"ids": None},
        {"n": True},
        {"n": 5.0},
    ],
    ids=str,
)
def test_other_versions_are_looked_up(launcher, others):
    """Of another dtype, at an odd address, in 64 bits, without a tensor, of another type."""
    usual, other = make_arguments(), make_arguments(**others)
    for arguments in (usual, usual, usual, other, other, usual):
        run(arguments)
    assert len(launcher.by_triton) == 2
    assert [number for number, _ in launcher.compiled] == [0, 0, 1, 0]


def test_odd_addresses_keep_their_version(launcher):
    odd, even = (make_arguments(ids=torch.zeros(66, dtype=torch.int64)[k:]) for k in (1, 2))
    for arguments in (odd, odd, odd, even, even, odd):
        run(arguments)
    assert len(launcher.by_triton) == 2
    assert [number for number, _ in launcher.compiled] == [0, 0, 1, 0]


def test_keys_begin_anywhere(launcher):
    """The kernel is not specialised on their address."""
    for first in (0, 1, 1, 2):
        run(make_arguments(keys=torch.zeros(70, dtype=torch.int64)[first:]))
    assert len(launcher.by_triton) == 1


def test_constants_and_options_have_shortcuts_of_their_own(launcher):
    for block, warps in ((64, 4), (128, 4), (64, 8), (64, 4), (128, 4), (64, 8)):
        run(make_arguments(), BLOCK=block, num_warps=warps)
    assert len(launcher.by_triton) == len(get_shortcuts()) == 3
    assert [number for number, _ in launcher.compiled] == [0, 1, 2]


def test_numbers_that_are_named_make_no_shortcuts(launcher):
    """There would be one for each learning rate."""
    weight, gradients = torch.zeros(4, 8), torch.zeros(2, 8)
    constants = {"SORTED": False, "CHUNK": 1, "STEPS": 1, "UNROLL": 1, "WIDTH": 8, "R": 4, "W": 8}
    for lr in (0.1, 0.2, 0.3, 0.4):
        launch.launch_kernel(
            sgd_kernel, (1,), weight, torch.zeros(2, dtype=torch.int64), gradients, None, None,
            None, 2, lr=lr, **constants,
        )  # fmt: skip
    held = launch._find_launcher(sgd_kernel)
    assert not held.takes_shortcuts and not held.shortcuts
    assert [handed[-8] for _, handed in launcher.compiled] == [0.2, 0.3, 0.4]


def test_specialised_numbers_have_no_shortcut():
    assert write_fit_function(find_kernel.params, make_arguments(), [BLOCK]) is not None
    fixed = [
        SimpleNamespace(
            do_not_specialize=False,
            do_not_specialize_on_alignment=each.do_not_specialize_on_alignment,
            is_constexpr=each.is_constexpr,
        )
        for each in find_kernel.params
    ]
    assert write_fit_function(fixed, make_arguments(), [BLOCK]) is None
