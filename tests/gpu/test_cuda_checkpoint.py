"""Checkpoints on a GPU: optimizer state comes back to where it was, device or host; what is not
finite is found there."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers.gpu_training import CudaClicks
from helpers.toys import Clicks, clicks_batch

import freescale
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.copies import StateCopies, find_room
from freescale.train.state.file_reads import FileReads
from freescale.train.state.finite_check import find_not_finite
from freescale.train.state.memory import write_segment
from freescale.transport.local import LocalTransport

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW, capturable": lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
}


def build(device, optimizer):
    torch.manual_seed(3)
    parallel = freescale.parallelize(
        CudaClicks(),
        Clicks.ids,
        freescale.Adam(lr=0.1),
        transport=LocalTransport(device),
        init_std=0.3,
    )
    dense = optimizer(parallel.dense_parameters())
    return parallel, dense, freescale.Pipeline(parallel, dense, precision="fp32")


def run(pipeline, first, last):
    list(pipeline.run([clicks_batch(5, seed) for seed in range(first, last)]))


def places(optimizer):
    return [
        [(key, value.device.type) for key, value in entries.items()]
        for entries in optimizer.state.values()
    ]


@pytest.mark.parametrize("before", ["cuda", "cpu"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumes_with_its_state_where_it_belongs(tmp_path, name, before):
    """From a CPU, where nothing is capturable, too."""
    parallel, dense, pipeline = build(
        before, OPTIMIZERS[name if before == "cuda" else name.partition(",")[0]]
    )
    run(pipeline, 0, 3)
    checkpoints = Checkpoints(tmp_path, parallel.transport)
    checkpoints.save(parallel, dense, {"step": 3, "pipeline": pipeline.state_dict()})
    resumed, fresh, again = build("cuda", OPTIMIZERS[name])
    checkpoints = Checkpoints(tmp_path, resumed.transport)
    again.load_state_dict(checkpoints.load(checkpoints.path(3), resumed, fresh)["pipeline"])
    if before == "cuda":
        assert places(fresh) == places(dense)
    run(pipeline, 3, 6)
    run(again, 3, 6)
    # A capturable optimizer has its bias corrections in float32, where a CPU's has them in Python's
    # numbers.
    close = (
        {"rtol": 1e-4, "atol": 1e-6}
        if name.endswith("capturable") and before == "cpu"
        else {"rtol": 1e-9, "atol": 1e-12}
    )
    for ours, theirs in zip(resumed.dense_parameters(), parallel.dense_parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), **close)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_number_that_is_not_finite_is_found(dtype, bad):
    for size in (1, 33, 100_000):
        for place in (0, size // 2, size - 1):
            values = torch.ones(size, dtype=dtype, device="cuda")
            assert find_not_finite({"a": values}) is None
            values[place] = bad
            assert find_not_finite({"a": values, "b": torch.ones(2)}) == "a"


def test_looking_for_them_takes_no_second_tensor():
    values = torch.ones(1 << 26, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert find_not_finite({"a": values}) is None
    assert torch.cuda.max_memory_allocated() - before < 1 << 22


def test_a_chain_that_is_written_beside_training_restores_the_bits(tmp_path):
    """Copies in pinned memory, made in the order of the stream: later steps do not reach them."""
    parallel, dense, pipeline = build("cuda", OPTIMIZERS["AdamW"])
    saved = Checkpoints(tmp_path, parallel.transport, keep=9, full_every=3, asynchronous=True)
    states = {}
    for result in pipeline.run([clicks_batch(5, seed) for seed in range(5)]):
        states[result.step] = collect_state(parallel)
        saved.save(parallel, dense, {"step": result.step})
    saved.wait()
    for step, expected in states.items():
        restored, _, _ = build("cuda", OPTIMIZERS["AdamW"])
        saved.load(saved.path(step), restored)
        for name, value in collect_state(restored).items():
            assert torch.equal(value, expected[name]), (step, name)


def collect_state(parallel):
    state = {name: value.clone() for name, value in parallel.module.named_parameters()}
    for table in parallel.tables.specs:
        local = parallel.tables.get_local_state(table)
        state |= {f"{table}/{name}": value.clone() for name, value in local.items()}
    return state


@pytest.mark.parametrize("room", [0, 1 << 30])  # over the bus at once, or later
@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("shape", [(), (0, 4), (3, 5), (5_000_001,), (2, 2_100_000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_copy_in_pieces_is_the_whole(shape, dtype, is_copy, room):
    """Some of more than one piece; what the stream does later does not change them."""
    value = torch.randint(0, 2, shape, device="cuda").to(dtype)
    expected, copies = value.cpu(), StateCopies(value.device, room)
    copied = copies.copy(value.clone() if is_copy else value, is_copy=is_copy)
    copies.seal()
    value.zero_()
    copies.finish()
    assert copied.device.type == "cpu" and (copied.is_pinned() or not copied.numel())
    assert torch.equal(copied, expected)


@pytest.mark.parametrize("room", [0, 300 * 200 * 4])
def test_a_copy_of_rows_that_lie_apart_is_finished_by_another_thread(room):
    """And only the first of two has room on the device."""
    turned = torch.rand(300, 200, device="cuda").t()
    other = torch.rand(200, 300, device="cuda")
    expected, copies = [turned.cpu(), other.cpu()], StateCopies(turned.device, room)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        copied = [copies.copy(turned), copies.copy(other)]
        copies.seal()
        turned.zero_()
        other.zero_()
    thread = threading.Thread(target=copies.finish)
    thread.start()
    thread.join()
    for found, value in zip(copied, expected, strict=True):
        assert torch.equal(found, value)


def test_half_of_what_is_free_is_room_for_copies():
    device = torch.device("cuda")
    free, _ = torch.cuda.mem_get_info(device)
    assert 0 < find_room(device) <= free


@pytest.mark.parametrize("rows", [7, 70_001, 1_000_003])  # at once; a piece; several, one cut short
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_come_back_in_pieces(rows, dtype):
    """Three, as a table and its row state: the pieces of one are used again for the next."""
    reads, sources = FileReads(), {f"{n}": torch.rand(rows, 64).to(dtype) for n in range(3)}
    segment = write_segment({}, sources)
    found = {name: torch.zeros(rows, 64, dtype=dtype, device="cuda") for name in sources}
    for name, to in found.items():
        segment.copy(name, to, reads)
    reads.close()
    for name, to in found.items():
        assert torch.equal(to.cpu(), sources[name])
