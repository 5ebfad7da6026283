"""Checkpoints: resumed runs equal uninterrupted ones to the bit, other numbers of ranks and
placements load, damage is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import batches, build, rewrite_as_format_1
from helpers.ranks import gather_ranks, run_ranks
from helpers.toys import clicks_batch
from helpers.training import assert_close, snapshot

from freescale.train.export import export_checkpoint
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.torch_files.safe_reader import SafeReader
from freescale.transport.local import LocalTransport


def save_after(transport, folder, steps, optimizer="adam", placement="sharded"):
    parallel, dense, pipeline = build(transport, optimizer, placement)
    list(pipeline.run(batches(transport, 0, steps)))
    noise = torch.rand(3)  # the random state is somewhere in the middle
    Checkpoints(Path(folder), transport).save(
        parallel, dense, {"step": steps, "pipeline": pipeline.state_dict()}
    )
    return noise, snapshot(parallel)


def go_on(transport, folder, first, last, optimizer="adam", placement="sharded"):
    parallel, dense, pipeline = build(transport, optimizer, placement)
    checkpoints = Checkpoints(Path(folder), transport)
    torch.manual_seed(99)
    progress = checkpoints.load(checkpoints.latest(), parallel, dense)
    pipeline.load_state_dict(progress["pipeline"])
    loaded = snapshot(parallel)
    noise = torch.rand(3)
    list(pipeline.run(batches(transport, first, last)))
    return loaded, noise, snapshot(parallel)


def uninterrupted(transport, steps, last, optimizer="adam"):
    parallel, _, pipeline = build(transport, optimizer)
    list(pipeline.run(batches(transport, 0, steps)))
    torch.rand(3)
    noise = torch.rand(3)
    list(pipeline.run(batches(transport, steps, last)))
    return noise, snapshot(parallel)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_resumed_equals_uninterrupted_to_the_bit(world, optimizer, tmp_path):
    run_ranks(world, save_after, str(tmp_path), 4, optimizer)
    resumed = run_ranks(world, go_on, str(tmp_path), 4, 7, optimizer)
    expected = run_ranks(world, uninterrupted, 4, 7, optimizer)
    for (_, noise, actual), (expected_noise, wanted) in zip(resumed, expected, strict=True):
        assert torch.equal(noise, expected_noise)
        for name, value in wanted.items():
            assert torch.equal(actual[name], value), name


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 4)])
def test_resumes_on_another_number_of_ranks_and_placement(before, after, tmp_path):
    _, saved = run_ranks(before, save_after, str(tmp_path), 3)[0]
    placement = {"item": "sharded", "action": "replicated"}
    loaded, _, moved_on = run_ranks(after, go_on, str(tmp_path), 3, 4, "adam", placement)[0]
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name
    _, expected = uninterrupted(LocalTransport(), 3, 4)
    assert_loosely(moved_on, expected)


def assert_loosely(actual, expected):
    """Four steps with other summation orders: equal but for rounding."""
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-6, atol=1e-9)


def test_more_ranks_than_rows(tmp_path):
    """A table of 5 rows on 4 ranks leaves one without any."""
    _, saved = run_ranks(4, save_after, str(tmp_path), 2)[0]
    loaded, _, _ = run_ranks(4, go_on, str(tmp_path), 2, 3)[0]
    assert_close(loaded, saved)


def test_without_a_process_group_and_export(tmp_path):
    _, saved = save_after(LocalTransport(), str(tmp_path), 3)
    loaded, _, _ = go_on(LocalTransport(), str(tmp_path), 3, 4)
    assert_close(loaded, saved)
    from safetensors.torch import load_file

    for path in export_checkpoint(tmp_path / "step-00000003", tmp_path / "out"):
        assert path.exists()
    assert torch.equal(
        load_file(tmp_path / "out" / "table.item.safetensors")["weight"], saved["item/rows"]
    )
    dense = load_file(tmp_path / "out" / "dense.safetensors")
    assert torch.equal(dense["layers.0.weight"], saved["layers.0.weight"])


def test_export_of_a_sharded_checkpoint(tmp_path):
    _, saved = run_ranks(3, save_after, str(tmp_path), 2)[0]
    from safetensors.torch import load_file

    list(export_checkpoint(tmp_path / "step-00000002", tmp_path / "out"))
    assert torch.equal(
        load_file(tmp_path / "out" / "table.item.safetensors")["weight"], saved["item/rows"]
    )


def test_a_killed_save_leaves_the_last_checkpoint(tmp_path):
    """A rank dies in the middle of a save (its process ends at the first file written): what was
    there stays whole."""
    run_ranks(2, save_after, str(tmp_path), 2)
    before = {p.name: p.read_bytes() for p in (tmp_path / "step-00000002").iterdir()}
    (error, _), _ = gather_ranks(2, _die_while_saving, str(tmp_path), lost=[1])
    assert error is not None
    checkpoints = Checkpoints(tmp_path, LocalTransport())
    assert checkpoints.steps() == [2]
    assert {p.name: p.read_bytes() for p in (tmp_path / "step-00000002").iterdir()} == before
    run_ranks(2, go_on, str(tmp_path), 2, 3)
    run_ranks(2, save_after, str(tmp_path), 5)  # and the next save clears what the dead one left
    assert not list(tmp_path.glob(".writing-*")) and checkpoints.steps() == [2, 5]


def _die_while_saving(transport, folder):
    import torch.distributed.checkpoint as dcp

    parallel, dense, pipeline = build(transport)
    list(pipeline.run(batches(transport, 0, 3)))
    if transport.rank == 1:
        write = dcp.FileSystemWriter.write_data

        def die(self, *args):
            write(self, *args)
            os._exit(9)

        dcp.FileSystemWriter.write_data = die
    Checkpoints(Path(folder), transport).save(parallel, dense, {"step": 3, "pipeline": {}})


def test_only_the_last_are_kept(tmp_path):
    parallel, dense, pipeline = build(LocalTransport())
    checkpoints = Checkpoints(tmp_path, LocalTransport(), keep=2)
    for seed in range(4):
        list(pipeline.run([clicks_batch(5, seed)]))
        checkpoints.save(parallel, dense, {"step": pipeline.steps, "pipeline": {}})
    assert checkpoints.steps() == [3, 4]


def test_another_model_is_refused(tmp_path):
    save_after(LocalTransport(), str(tmp_path), 1)
    path = tmp_path / "step-00000001"
    parallel, dense, _ = build(LocalTransport(), items=300)
    with pytest.raises(
        ValueError,
        match=(
            r"another model: table 'item' is \[200, 8, .* there, "
            r"\[300, 8"
        ),
    ):
        Checkpoints(tmp_path, LocalTransport()).load(path, parallel, dense)
    parallel, dense, _ = build(LocalTransport(), optimizer="sgd")
    with pytest.raises(ValueError, match="another model: table 'action'"):
        Checkpoints(tmp_path, LocalTransport()).load(path, parallel, dense)
    parallel, _, _ = build(LocalTransport())
    with pytest.raises(ValueError, match="was trained with AdamW, not SGD"):
        Checkpoints(tmp_path, LocalTransport()).load(
            path, parallel, torch.optim.SGD(parallel.dense_parameters(), lr=0.1)
        )


def test_what_is_no_checkpoint_is_refused(tmp_path):
    parallel, dense, _ = build(LocalTransport())
    with pytest.raises(ValueError, match="has no state.json"):
        Checkpoints(tmp_path, LocalTransport()).load(tmp_path, parallel, dense)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ValueError, match="state.json is damaged"):
        Checkpoints(tmp_path, LocalTransport()).load(tmp_path, parallel, dense)
    (tmp_path / "state.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="state.json is damaged"):
        Checkpoints(tmp_path, LocalTransport()).load(tmp_path, parallel, dense)


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_pickled_code_is_not_executed(tmp_path):
    save_after(LocalTransport(), str(tmp_path / "run"), 1)
    path = tmp_path / "run" / "step-00000001"
    (path / ".metadata").write_bytes(pickle.dumps(_Evil(str(tmp_path / "owned"))))
    rewrite_as_format_1(path)  # who changes files on purpose has checksums that fit, or none
    parallel, dense, _ = build(LocalTransport())
    with pytest.raises(ValueError, match=r"holds posix.mkdir, .* refused"):
        Checkpoints(tmp_path / "run", LocalTransport()).load(path, parallel, dense)
    assert not (tmp_path / "owned").exists()


def test_entries_that_are_not_tensors_are_refused(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save({"bytes": {"a": "text"}}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    with pytest.raises(ValueError, match="refused"):
        SafeReader(tmp_path).read_metadata()
    shutil.rmtree(tmp_path)
