"""The folder of checkpoints: the one just saved stays, a kill or a full disk leaves one that loads,
damage is found by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.checkpoints import batches, build, killed_at, rewrite_as_format_1
from helpers.ranks import run_ranks
from helpers.toys import clicks_batch
from helpers.training import snapshot

from freescale.train.export import export
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.disk import DELTA_FORMAT, Damaged, read_state, write_state
from freescale.transport.local import LocalTransport


def trained(folder, *steps, keep=5, transport=None):
    """A run of one batch a step, saved after some."""
    transport = transport or LocalTransport()
    parallel, dense, pipeline = build(transport)
    checkpoints = Checkpoints(Path(folder), transport, keep)
    for result in pipeline.run(batches(transport, 0, steps[-1])):
        if result.step in steps:
            checkpoints.save(
                parallel, dense, {"step": result.step, "pipeline": pipeline.state_dict()}
            )
    return parallel, dense, checkpoints


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- which stay


def test_a_copy_beside_the_checkpoints_is_ignored(tmp_path):
    parallel, dense, checkpoints = trained(tmp_path, 1, 2)
    copies = ["step-00000002-keep", "step-00000002.bak", "step-2", "step-000000009", "step-last"]
    for name in copies:
        shutil.copytree(tmp_path / "step-00000002", tmp_path / name)
    (tmp_path / "step-00000009").write_text("a file")
    assert checkpoints.steps() == [1, 2] and checkpoints.latest() == tmp_path / "step-00000002"
    checkpoints.keep = 1
    checkpoints.save(parallel, dense, {"step": 3})
    assert names(tmp_path) == sorted([*copies, "step-00000003", "step-00000009"])


def test_steps_of_another_run_are_refused_before_anything_is_written(tmp_path):
    trained(tmp_path, 5, 10)
    before = names(tmp_path)
    parallel, dense, pipeline = build(LocalTransport())
    list(pipeline.run([clicks_batch(5, 0)]))
    with pytest.raises(
        ValueError,
        match=(
            r"ahead of step 1 \(step-00000005, "
            r"step-00000010\).*remove them, or use another folder"
        ),
    ):
        Checkpoints(tmp_path, LocalTransport()).save(parallel, dense, {"step": 1})
    assert names(tmp_path) == before


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_checkpoint_just_saved_is_never_removed(tmp_path, keep):
    """Also where the folder holds those of an equal step and of earlier ones."""
    trained(tmp_path, 1, 2, 3)
    parallel, dense, _ = build(LocalTransport())
    parallel.tables.place()
    saved = Checkpoints(tmp_path, LocalTransport(), keep).save(parallel, dense, {"step": 3})
    assert (
        saved.exists()
        and names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"][-keep:]
    )


def test_going_back_gives_up_the_later_ones(tmp_path):
    """When it is checked that the run may go on: one that is killed before its next save does not
    come back to them. They go with the next save that succeeds, whatever its step."""
    trained(tmp_path, 1, 2, 4, 6)
    parallel, dense, _ = build(LocalTransport())
    checkpoints = Checkpoints(tmp_path, LocalTransport(), keep=5)
    with pytest.warns(
        UserWarning,
        match="going on after step 2: step-00000004, step-00000006 will be given up.* removed when",
    ):
        checkpoints.load(checkpoints.path(2), parallel, dense)
    assert checkpoints.steps() == [1, 2, 4, 6]
    checkpoints.check(parallel, dense, 2)
    kept, given_up = ["step-00000001", "step-00000002"], ["given-up-00000004", "given-up-00000006"]
    assert names(tmp_path) == [*given_up, *kept]
    again = Checkpoints(tmp_path, LocalTransport())
    assert again.last_intact().path == again.latest() == tmp_path / "step-00000002"
    (tmp_path / "given-up-00000006").rename(tmp_path / "step-00000006")  # a change of mind
    assert again.load(again.last_intact(), parallel, dense)["step"] == 6
    with pytest.warns(UserWarning, match="step-00000006 will be given up"):
        checkpoints.load(checkpoints.path(2), parallel, dense)
    shutil.copytree(tmp_path / "given-up-00000004", tmp_path / "given-up-00000004-keep")
    checkpoints.save(parallel, dense, {"step": 5})
    assert names(tmp_path) == ["given-up-00000004-keep", *kept, "step-00000005"]
    with pytest.raises(ValueError, match="ahead of step 4"):  # it came from 5 now
        checkpoints.save(parallel, dense, {"step": 4})


def test_looking_at_an_earlier_checkpoint_leaves_nothing_behind(tmp_path, recwarn):
    parallel, dense, checkpoints = trained(tmp_path, 1, 2)
    other, _, _ = build(LocalTransport())
    checkpoints.load(checkpoints.path(1), other)
    assert not [said for said in recwarn if "removed" in str(said.message)]
    checkpoints.save(parallel, dense, {"step": 3})
    assert checkpoints.steps() == [1, 2, 3]


def test_a_checkpoint_that_is_a_link_goes_without_its_target(tmp_path):
    """As after a move to another disk: when it expires, when its step is saved again, and left
    over by a save that failed on it."""
    parallel, dense, checkpoints = trained(tmp_path / "run", 1, 2, 3, keep=3)
    for step in (1, 3):
        elsewhere = tmp_path / f"elsewhere-{step}"
        shutil.move(checkpoints.path(step), elsewhere)
        checkpoints.path(step).symlink_to(elsewhere)
    (tmp_path / "run" / "step-00000004").symlink_to(tmp_path / "gone")
    (tmp_path / "run" / ".removing-00000000").symlink_to(tmp_path / "elsewhere-1")
    assert checkpoints.steps() == [1, 2, 3]
    checkpoints.save(parallel, dense, {"step": 3})
    assert not checkpoints.path(3).is_symlink()
    checkpoints.save(parallel, dense, {"step": 4})
    assert names(tmp_path / "run") == ["step-00000002", "step-00000003", "step-00000004"]
    assert (tmp_path / "elsewhere-1" / "state.json").exists()
    assert (tmp_path / "elsewhere-3" / "state.json").exists()


def test_a_run_goes_on_from_a_link(tmp_path):
    """It is one of the folder, wherever its files are: those after it are given up."""
    _, _, checkpoints = trained(tmp_path / "run", 1, 2)
    shutil.move(checkpoints.path(1), tmp_path / "elsewhere")
    checkpoints.path(1).symlink_to(tmp_path / "elsewhere")
    parallel, dense, _ = build(LocalTransport())
    with pytest.warns(UserWarning, match="step-00000002 will be given up"):
        checkpoints.load(checkpoints.path(1), parallel, dense)
    checkpoints.save(parallel, dense, {"step": 2})
    assert names(tmp_path / "run") == ["step-00000001", "step-00000002"]


# ---- killed


@pytest.mark.parametrize("step", [3, 4], ids=["over the same step", "after it"])
def test_a_kill_at_any_point_leaves_a_checkpoint_that_loads(tmp_path, step):
    parallel, dense, checkpoints = trained(tmp_path / "run", 3, keep=1)
    before, whole = snapshot(parallel), tmp_path / "whole"
    shutil.copytree(tmp_path / "run", whole)
    parallel.module.layers[0].weight.data += 1
    after = snapshot(parallel)
    number, found = 0, []
    while killed_at(number, lambda: checkpoints.save(parallel, dense, {"step": step})):
        fresh, optimizer, _ = build(LocalTransport())
        again = Checkpoints(tmp_path / "run", LocalTransport(), keep=1)
        progress = again.load(again.latest(), fresh, optimizer)
        now = snapshot(fresh)
        old, new = (
            all(torch.equal(now[name], value) for name, value in state.items())
            for state in (before, after)
        )
        assert (old and progress["step"] == 3) or (new and progress["step"] == step), number
        found.append(new)
        again.save(fresh, optimizer, {"step": 5})  # and the next save clears what is left
        assert names(tmp_path / "run") == ["step-00000005"]
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(whole, tmp_path / "run")
        number += 1
    assert number > 10 and found == sorted(found) and found[0] != found[-1]
    assert names(tmp_path / "run") == [f"step-{step:08d}"]


def test_a_kill_while_the_later_ones_are_given_up_leaves_the_earlier_ones(tmp_path):
    """Of a chain, too: none is without its parent. The same load completes it."""
    _, _, checkpoints = trained(tmp_path / "run", 1, 2, 4, 6)
    shutil.copytree(checkpoints.path(6), tmp_path / "run" / "step-00000006.replaced")
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    parallel, dense, _ = build(LocalTransport())

    def go_back():
        checkpoints.load(checkpoints.path(2), parallel, dense)
        checkpoints.check(parallel, dense, 2)

    number, found = 0, []
    while killed_at(number, go_back):
        found.append(checkpoints.steps())
        go_back()
        assert checkpoints.steps() == [1, 2]
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "whole", tmp_path / "run")
        number += 1
    assert found[0] == [1, 2, 4, 6] and [1, 2, 4] in found
    assert all(steps == [1, 2, 4, 6][: len(steps)] for steps in found)


# ---- damaged


def flipped(data):
    return (
        data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0x40]) + data[len(data) // 2 + 1 :]
    )


def zeroed(data):
    return data[:512] + bytes(len(data) - 512)


def half(data):
    return data[: len(data) // 2]


def short(data):
    return data[:-1]


@pytest.mark.parametrize("damage", [flipped, zeroed, half, short])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
def test_damage_is_found_and_named_before_anything_is_loaded(tmp_path, name, damage):
    _, _, checkpoints = trained(tmp_path, 1)
    path = tmp_path / "step-00000001" / name
    path.write_bytes(damage(path.read_bytes()))
    parallel, dense, _ = build(LocalTransport())
    parallel.tables.place()
    before = snapshot(parallel)
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        checkpoints.load(path.parent, parallel, dense)
    after = snapshot(parallel)
    assert all(torch.equal(after[key], value) for key, value in before.items()) and not dense.state


def test_a_missing_file_and_one_of_another_step_are_damage(tmp_path):
    _, _, checkpoints = trained(tmp_path, 1, 2)
    parallel, dense, _ = build(LocalTransport())
    tensors = tmp_path / "step-00000002" / "__0_0.distcp"
    shutil.copy(tmp_path / "step-00000001" / "__0_0.distcp", tensors)
    with pytest.raises(ValueError, match="__0_0.distcp is damaged"):
        checkpoints.load(tensors.parent, parallel, dense)
    tensors.unlink()
    with pytest.raises(ValueError, match="__0_0.distcp cannot be read"):
        checkpoints.load(tensors.parent, parallel, dense)


def test_the_one_before_is_taken_with_a_warning(tmp_path):
    _, _, checkpoints = trained(tmp_path / "checkpoints", 1, 2, 3)
    for step, name in ((3, "__0_0.distcp"), (2, "state.json")):
        path = checkpoints.path(step) / name
        path.write_bytes(flipped(path.read_bytes()))
    with pytest.warns(UserWarning) as said:
        found = checkpoints.last_intact()
    assert found.path == checkpoints.path(1)
    assert "step-00000003/__0_0.distcp is damaged" in str(said[0].message)
    assert "step-00000002/state.json is damaged" in str(said[1].message) and len(said) == 2
    assert export(found, tmp_path / "out")[0].name == "dense.safetensors"
    parallel, dense, _ = build(LocalTransport())
    with pytest.warns(UserWarning, match="step-00000002, step-00000003 will be given up"):
        assert checkpoints.load(found, parallel, dense)["step"] == 1
    path = checkpoints.path(1) / "__0_0.distcp"
    path.write_bytes(flipped(path.read_bytes()))
    with pytest.raises(ValueError, match="step-00000001/__0_0.distcp is damaged"):
        checkpoints.last_intact()


def test_any_flipped_bit_of_the_state_is_damage(tmp_path):
    """Also in the format: 3 becomes 1, which has no checksum, or one that nobody knows."""
    state = {"format": DELTA_FORMAT, "files": {"a": [1, 2]}, "progress": {"step": 7}}
    write_state(tmp_path, state)
    path = tmp_path / "state.json"
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(Damaged, match="state.json is damaged"):
            read_state(tmp_path)


def test_a_checkpoint_of_a_newer_version_is_no_damage(tmp_path):
    """The one before it is not taken: that would train the newer version's steps again."""
    parallel, dense, checkpoints = trained(tmp_path, 1, 2)
    path = checkpoints.path(2)
    state = read_state(path)
    write_state(path, state | {"format": 4})
    for load in (checkpoints.last_intact, lambda: checkpoints.load(path, parallel, dense)):
        with pytest.raises(ValueError, match="checkpoint format 4.* reads 1 to 3: .*newer") as said:
            load()
        assert not isinstance(said.value, Damaged)
    (path / "state.json").write_text(json.dumps({"format": 4}))  # nobody has written that
    with pytest.warns(UserWarning, match="step-00000002/state.json is damaged"):
        assert checkpoints.last_intact().path == checkpoints.path(1)


def test_a_checkpoint_without_checksums_loads(tmp_path):
    parallel, _, checkpoints = trained(tmp_path, 2)
    rewrite_as_format_1(checkpoints.path(2))
    fresh, dense, _ = build(LocalTransport())
    assert checkpoints.load(checkpoints.last_intact(), fresh, dense)["step"] == 2
    expected, actual = snapshot(parallel), snapshot(fresh)
    assert all(torch.equal(actual[name], value) for name, value in expected.items()) and dense.state


def _fall_back(transport, folder):
    """Each file is compared on one rank; what it finds all know. -> what was loaded, and the files
    that were written."""
    _, _, checkpoints = trained(Path(folder), 1, 2, transport=transport)
    files = sorted(path.name for path in checkpoints.path(2).iterdir())
    if transport.rank == 0:
        path = checkpoints.path(2) / "__1_0.distcp"
        path.write_bytes(flipped(path.read_bytes()))
    transport.gather_bytes(b"")
    parallel, dense, _ = build(transport)
    try:
        checkpoints.load(checkpoints.path(2), parallel, dense)
    except ValueError as error:
        said = str(error)
    step = checkpoints.load(checkpoints.last_intact(), parallel, dense)["step"]
    checkpoints.save(parallel, dense, {"step": 2})
    return said, step, files, checkpoints.steps()


def test_all_ranks_take_the_same_one(tmp_path):
    results = run_ranks(2, _fall_back, str(tmp_path))
    assert results[0] == results[1]
    said, step, files, left = results[0]
    assert "step-00000002/__1_0.distcp is damaged" in said and step == 1 and left == [1, 2]
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "state.json"]


# ---- full


def test_a_full_disk_is_said_and_leaves_nothing_behind(tmp_path):
    mounted = f"mount -t tmpfs -o size=1700k tmpfs {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mounted], capture_output=True).returncode:
        pytest.skip("no small disk to be had here: mounts are not allowed")
    program = [sys.executable, "-m", "helpers.full_disk", str(tmp_path)]
    run = ["unshare", "-rm", "sh", "-c", f'{mounted} && exec "$@"', "sh", *program]
    tests = Path(__file__).parents[1]
    done = subprocess.run(run, cwd=tests, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
