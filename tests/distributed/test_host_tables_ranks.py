"""Host and disk tables on several ranks: the bits of tables on the device, staged and serial. Three
consecutive batches read 120 rows, which are spread over the ranks; caches hold few more."""

from __future__ import annotations

import os
import signal
from errno import ENOSPC
from pathlib import Path

import pytest
import torch
from helpers import dynamic_streams
from helpers.collisions import batch_of, build, colliding, share_of, state_of, train
from helpers.ranks import gather_ranks, run_ranks

from freescale.embedding.host_tables.copies import HostCopies
from freescale.embedding.host_tables.tiers import Disk, Host
from freescale.embedding.storage import cached
from freescale.train.state.checkpoints import Checkpoints
from freescale.transport.local import LocalTransport


def _returning(step):
    """Ids that come back after five batches."""
    return [(i * 7 + 40 * (step % 5)) % 200 for i in range(40)]


STREAMS = [colliding(0.3, steps=12), [_returning(step) for step in range(12)]]


def _differences(transport, folder):
    found, cache = {}, 8 * 8 * 3 * (140 // transport.world + 10)
    for number, stream in enumerate(STREAMS):
        losses, expected = train(transport, "serial", stream, optimizer="adam")
        for schedule, tier in (
            ("serial", Host(cache)),
            ("staged", Host(cache)),
            ("staged", Disk(folder, cache)),
        ):
            placement = {"item": tier, "action": "sharded"}
            own_losses, own = train(
                transport, schedule, stream, optimizer="adam", placement=placement
            )
            different = [
                name for name, value in expected.items() if not torch.equal(own[name], value)
            ]
            found[number, schedule, str(tier)] = different + ["losses"] * (losses != own_losses)
    return found


def test_bit_equal_to_tables_on_the_device(tmp_path):
    for found in run_ranks(3, _differences, str(tmp_path)):
        assert len(found) == 6 and found == dict.fromkeys(found, [])


def _too_small(transport):
    """The words of both schedules. Caches of 27 rows: two of the ranks need no more."""
    found = []
    for schedule in ("staged", "serial"):
        placement = {"item": Host(128 * 27), "action": "sharded"}
        with pytest.raises(ValueError) as error:
            train(transport, schedule, STREAMS[1], placement=placement)
        found.append(str(error.value))
    return found


def test_a_cache_too_small_on_some_ranks_ends_all_with_the_same_words():
    (staged, serial), *others = run_ranks(3, _too_small)
    assert staged == serial and all(words == [staged, serial] for words in others)
    assert staged == (
        "rank 2: table 'item': the cache holds 27 rows of this rank (3.5 kB), 3 consecutive "
        "batches read 28 rows: give it at least 3.6 kB, or use smaller batches or more ranks"
    )


def _too_small_behind_ids(transport):
    """As `_too_small`, of a dynamic table whose new ids all belong to the last rank."""
    found = []
    for schedule in ("staged", "serial"):
        placement = {"item": Host(128 * 30), "action": "sharded"}
        _, pipeline = dynamic_streams.build(
            transport, schedule, dynamic_streams.RULES[0], placement=placement
        )
        ids = [
            [dynamic_streams.id_in(4000 + (20 * step + place) % 90, step) for place in range(20)]
            for step in range(6)
        ]
        with pytest.raises(ValueError, match="the cache holds 30 rows") as error:
            list(pipeline.run(share_of(batch_of(one, n), transport) for n, one in enumerate(ids)))
        found.append(str(error.value))
    return found


def test_a_cache_too_small_for_a_dynamic_table_ends_all_ranks():
    for staged, serial in run_ranks(3, _too_small_behind_ids):
        assert staged == serial and staged.startswith("rank 2: table 'item'")


def _refused(transport, folder):
    """What all ranks say if one of them does not get what its home needs."""
    found = []
    for owner, name, error in (
        (os, "posix_fallocate", OSError(ENOSPC, "No space left on device")),
        (cached, "HostCopies", ValueError("128 MiB of pinned host memory cannot be had")),
    ):
        plain = getattr(owner, name)

        def refuse(*_, error=error):
            raise error

        if transport.rank == 1:
            setattr(owner, name, refuse)
        placement = {"item": Disk(folder, 128 * 60), "action": "sharded"}
        with pytest.raises((ValueError, RuntimeError)) as words:
            train(transport, "staged", STREAMS[1], placement=placement)
        found.append(str(words.value))
        setattr(owner, name, plain)
    train(transport, "staged", STREAMS[1][:2], placement=placement)  # the ranks can go on
    return found


def test_what_one_rank_cannot_have_ends_all(tmp_path):
    for rank, (disk, pinned) in enumerate(run_ranks(2, _refused, str(tmp_path))):
        other = "rank 1 stopped: ValueError: " if rank != 1 else ""
        assert disk.startswith(f"{other}table 'item': ")
        assert f"cannot be had in {tmp_path} (No space left on device): make room" in disk
        assert pinned == f"{other}128 MiB of pinned host memory cannot be had"
    assert list(tmp_path.iterdir()) == []


LAST = 7  # step of the last checkpoint


def _train_until_lost(transport, folder, cut):
    """Dies in the write-back after the checkpoint of step `LAST`: the rows of the home are newer
    than their optimizer state, and half of that is old."""
    tier = Disk(folder, 8 * 8 * 3 * 130)
    placement = {"item": tier, "action": "sharded"}
    parallel, pipeline = build(transport, "staged", optimizer="adam", placement=placement)
    checkpoints = Checkpoints(Path(folder, "run"), transport, full_every=3)
    plain, sent = HostCopies.send, []

    def send(self, home, rows, cache, slots):
        if pipeline.steps >= LAST and checkpoints.steps()[-1:] == [LAST]:
            sent.append(rows)
        if len(sent) == 2:
            half = rows.size // 2
            assert half
            plain(self, home, rows[:half], cache, slots[:half])
            if not cut:
                os.kill(os.getpid(), signal.SIGKILL)
            (file,) = (
                file
                for file in Path("/proc/self/fd").iterdir()
                if file.is_symlink() and os.readlink(file).startswith(f"{folder}/#")
            )
            os.truncate(file, 0)  # the next access is a SIGBUS
        plain(self, home, rows, cache, slots)

    HostCopies.send = send
    for result in pipeline.run(batch_of(ids, n) for n, ids in enumerate(STREAMS[1])):
        if result.step <= LAST:
            progress = {"step": result.step, "pipeline": pipeline.state_dict()}
            checkpoints.save(parallel, pipeline.optimizer, progress)
    Path(folder, "survived").touch()


@pytest.mark.parametrize("cut", [False, True], ids=["killed", "file cut short"])
def test_resume_after_a_loss_in_the_middle_of_a_write_back(cut, tmp_path):
    """The home is never read again: what goes on is the checkpoint, here on the device."""
    gather_ranks(1, _train_until_lost, str(tmp_path), cut, lost=[0], timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    losses, expected = train(LocalTransport(), "serial", STREAMS[1], optimizer="adam")
    parallel, pipeline = build(LocalTransport(), "serial", optimizer="adam")
    checkpoints = Checkpoints(tmp_path / "run", LocalTransport())
    assert checkpoints.latest() == checkpoints.path(LAST)
    progress = checkpoints.load(checkpoints.latest(), parallel, pipeline.optimizer)
    pipeline.load_state_dict(progress["pipeline"])
    rest = [batch_of(ids, n) for n, ids in enumerate(STREAMS[1])][LAST:]
    assert [result.loss for result in pipeline.run(rest)] == losses[LAST:]
    own = state_of(parallel)
    assert [name for name, value in expected.items() if not torch.equal(own[name], value)] == []
