"""Open files: how many a rank needs for each other one, and what happens where they are too few."""

from __future__ import annotations

import os
import resource
import sys

import pytest
import torch
from helpers.ranks import gather_ranks, run_ranks
from helpers.toys import Clicks, clicks_batch

import freescale
from freescale.cli import doctor
from freescale.pipeline.dense import buckets
from freescale.transport import descriptors
from freescale.transport.connect import connect
from freescale.transport.descriptors import count_fitting_ranks, count_needed, count_per_rank
from freescale.transport.hostwire import opening


def _opened(transport, name, together):
    """Descriptors that a transport and a pipeline take, one with all lanes that there are; and all
    that are open then."""
    os.environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
    if not together:
        opening.identify_machine = lambda: b"machine %d" % transport.rank
    buckets._LEAST_BYTES["cpu"] = 1  # several: one alone would need no lane on a CPU
    before = len(os.listdir("/proc/self/fd"))
    made = connect("cpu", transport=name)
    parallel = freescale.parallelize(
        Clicks(), Clicks.ids, freescale.SGD(lr=0.1), transport=made, placement="sharded"
    )
    optimizer = torch.optim.SGD(parallel.dense_parameters(), lr=0.1)
    pipeline = freescale.Pipeline(parallel, optimizer, schedule="staged", dense_sums="partitioned")
    list(pipeline.run([clicks_batch(3, 10 * step + made.rank) for step in range(3)]))
    made.gather_bytes(b"")
    after = len(os.listdir("/proc/self/fd"))
    made.gather_bytes(b"")
    return after - before, after


@pytest.mark.parametrize(
    ("name", "together"),
    [
        ("collective", True),
        ("hostwire-tcp", True),
        ("hostwire-tcp", False),
        ("hostwire-ucx", True),
    ],
)
def test_descriptors_for_each_other_rank(name, together):
    two, three = (run_ranks(world, _opened, name, together) for world in (2, 3))
    more = {third - first for (first, _), (third, _) in zip(two, three, strict=False)}
    # Less the connection of torch's own group, which was there before, and that of the store, which
    # is a file here.
    assert more == {count_per_rank(name, "cpu", neighbour=together) - 2}
    for world, found in ((2, two), (3, three)):
        assert max(all_ for _, all_ in found) < count_needed(
            name, "cpu", world, world if together else 1
        )


def _limited(transport, soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    made = connect("cpu", transport="hostwire-tcp")
    made.close()
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_the_soft_limit_is_raised_to_the_hard_one():
    assert run_ranks(2, _limited, 200, 2000) == [(2000, 2000)] * 2


def _too_few(transport):
    if transport.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    with pytest.raises(ValueError) as caught:
        connect("cpu", transport="hostwire-tcp")
    return str(caught.value)


def test_too_few_on_one_rank_are_an_error_on_all():
    for error, text in gather_ranks(2, _too_few):
        assert error is None, error
        assert (
            "2 ranks over hostwire-tcp need about" in text
            and "rank 1 may have 100" in text
            and "ulimit -Hn" in text
        )


def test_too_few_are_an_error_before_the_ranks_meet(monkeypatch):
    """Nobody else is there: a rank that tried to meet them would wait."""
    for name, value in {
        "RANK": 0,
        "WORLD_SIZE": 100_000,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    # a hard limit cannot be raised again
    monkeypatch.setattr(sys.modules[connect.__module__], "raise_limit", lambda: 4096)
    with pytest.raises(
        ValueError,
        match=(
            r"100,000 ranks over auto need about 800,248 open "
            r"files.* 4,096: start at most 481"
        ),
    ):
        connect("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["auto", "collective", "hostwire-tcp", "hostwire-ucx"])
@pytest.mark.parametrize("local", [1, 8, 500])
def test_as_many_fit_as_are_needed_for(name, device, local):
    for limit in (1024, 4096, 65_536):
        world = count_fitting_ranks(name, device, limit, local)
        assert (
            count_needed(name, device, world, local)
            <= limit
            < count_needed(name, device, world + 1, local)
        )


def test_doctor_says_how_many_ranks_fit(monkeypatch):
    monkeypatch.setattr(descriptors, "read_hard_limit", lambda: 1024)
    ((found, follows),) = [row[1:] for row in doctor.examine() if row[0] == "open files"]
    name = "hostwire-tcp" if not torch.cuda.is_available() else ""
    assert found == "1,024" and "ranks fit" in follows
    assert (
        not name
        or f"about {count_fitting_ranks(name, 'cpu', 1024)} ranks" in follows
        and f"{count_per_rank(name, 'cpu')} for each" in follows
    )
