"""The two-level exchange on ranks that count as several machines, against sums one by one, and
the staged schedule against the serial one."""

from __future__ import annotations

import json
import os
from datetime import timedelta

import pytest
import torch
from helpers.collisions import (
    StagedAsOnGpus,
    batch_of,
    build,
    colliding,
    in_pieces,
    share_of,
    train,
)
from helpers.ranks import gather_ranks, run_ranks
from helpers.wires import wired

from freescale.batch import Jagged, SequenceBatch
from freescale.embedding.groups.sharded import Sharded
from freescale.embedding.layout import TableSpec, spread_ids
from freescale.embedding.optimizers import SGD
from freescale.embedding.two_level import is_two_level
from freescale.ledger.ledger import Ledger
from freescale.train.state.checkpoints import Checkpoints
from freescale.train.state.disk import write_state
from freescale.transport.hostwire.transport import HostwireTransport

MACHINES = {
    "2 machines of 2": [0, 0, 1, 1],
    "ranks in turn": [0, 1, 0, 1],
    "3 and 1": [1, 1, 1, 0],
}
ITEMS, WIDTH = 60, 3


def _draw(case: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different ids [n] of a rank's batch, many of them in those of others, and gradients."""
    generator = torch.Generator().manual_seed(97 * case + rank)
    count = int(torch.randint(25, 55, (1,), generator=generator)) * (case != rank)
    ids = torch.randperm(ITEMS, generator=generator)[:count]
    scale = 10.0 ** torch.randint(-3, 4, (count, 1), generator=generator)
    return ids, torch.randn(count, WIDTH, generator=generator) * scale


def _sum_one_by_one(case, machines, owner, wire):
    """[ITEMS, width] sums, in the order that two_level.py promises, for an owner; and how often
    each row crosses to it."""
    members = {machine: [r for r in range(4) if machines[r] == machine] for machine in machines}
    number = members[machines[owner]].index(owner)
    leaders = {own[number % len(own)]: machine for machine, own in members.items()}
    total, crossings = torch.full((ITEMS, WIDTH), -0.0), torch.zeros(ITEMS)
    for leader in sorted(leaders):
        sums, seen = torch.full((ITEMS, WIDTH), -0.0), torch.zeros(ITEMS, dtype=torch.bool)
        for rank in members[leaders[leader]]:
            ids, gradients = _draw(case, rank)
            sums[ids] += gradients
            seen[ids] = True
        total[seen] += sums[seen].to(wire).float()
        crossings += seen * (leaders[leader] != machines[owner])
    return total, crossings


def _compare_sums(transport, wire):
    """Whether rows and sums are wrong, how many bytes too many crossed, and in how many cases the
    flat exchange has other bits."""
    spec = TableSpec("item", ITEMS, WIDTH, torch.float32, ("history",))
    table = torch.randn(ITEMS, WIDTH, generator=torch.Generator().manual_seed(9))
    wrong, others = [], 0
    for case, machines in enumerate([*MACHINES.values()] * 2):
        transport.machines = machines
        ids, gradients = _draw(case, transport.rank)
        history = {"history": Jagged(ids, torch.ones_like(ids))}
        batch = SequenceBatch(sequences=history, keys=torch.arange(len(ids)), number=case)
        changed = {}
        for exchange in ("flat", "two-level"):
            group = Sharded([spec], SGD(lr=1.0), transport, wire, exchange=exchange)
            group.rows.copy_from("item", table)
            transport.ledger.begin_step(case)
            request = group.request([batch], transport)
            rows = group.fetch(request, transport, train=True)
            part, index, _ = rows.locate(0, ids)
            values = rows.read(part, index)
            if not torch.equal(values.detach(), table[ids].to(wire).float()):
                wrong.append(f"{case}: rows")
            (values * gradients).sum().backward()
            group.update(group.collect(rows, transport), transport, step=1, factor=1.0, clip=None)
            transport.ledger.end_step()
            changed[exchange] = group.rows.get_tensors("item")["rows"].clone()
        owned, far = group.rows.get_ids("item"), transport.ledger._finished[-1].collectives
        total, crossings = _sum_one_by_one(case, machines, transport.rank, wire)
        first, last = group.layout.get_owned_range(0, transport.rank)
        assert torch.equal(spread_ids(owned, ITEMS), torch.arange(first, last))
        if not torch.equal(changed["two-level"], (table - total)[owned]):
            wrong.append(f"{case}: sums")
        sent = sum(each.far for each in far if each.kind == "rows")
        if sent != crossings[owned].sum() * WIDTH * wire.itemsize:
            wrong.append(f"{case}: {sent} bytes of rows")
        others += not torch.equal(*changed.values())
    return wrong, others


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_machines_in_order(wire):
    """Rounded once on the way, after the ranks of a machine; a row crosses once per machine."""
    found = run_ranks(4, _compare_sums, wire)
    assert [wrong for wrong, _ in found] == [[]] * 4
    assert sum(others for _, others in found)


def _differences(transport):
    """What is not bit-equal to the serial schedule."""
    found = {}
    for name, machines in MACHINES.items():
        transport.machines = machines
        for wire in (None, torch.bfloat16):
            options = {"wire": wire, "optimizer": "adam" if wire is None else "adagrad"}
            options["exchange"] = "two-level"
            stream = colliding(0.4, steps=6)
            losses, expected = train(transport, "serial", stream, **options)
            for schedule in ("staged", StagedAsOnGpus)[: 1 if wire else 2]:
                actual_losses, actual = train(transport, schedule, stream, **options)
                wrong = [n for n, value in expected.items() if not torch.equal(actual[n], value)]
                wrong += ["losses"] * (actual_losses != losses)
                found[f"{name}, {wire}, {schedule}"] = wrong
    return found


def test_staged_is_serial():
    for found in run_ranks(4, _differences):
        assert found == dict.fromkeys(found, [])


def _open(transport, wire, seconds):
    if wire == "process group":
        transport.machines = [0, 0, 1, 1]
        return transport
    kind, shared = wired(wire)
    options = {"shared": shared, "timeout": timedelta(seconds=seconds)}
    made = HostwireTransport("cpu", Ledger(), transport.group, transport.control, kind, **options)
    made.machines = [0, 0, 1, 1]
    return made


def _over(transport, wire):
    """Whether staged over a wire has the bits of serial over process groups."""
    over, stream = _open(transport, wire, 60.0), colliding(0.4, steps=8)
    transport.machines = over.machines
    losses, expected = train(transport, "serial", stream, exchange="two-level")
    actual_losses, actual = train(over, "staged", stream, exchange="two-level")
    over.close()
    return actual_losses == losses and all(
        torch.equal(actual[name], value) for name, value in expected.items()
    )


@pytest.mark.parametrize("wire", ["shared memory", "tcp"])
def test_staged_is_serial_over_hostwire(wire):
    assert run_ranks(4, _over, wire) == [True] * 4


def _dies(transport, wire):
    """A rank exchanges nothing with that of the other machine and another number."""
    over = _open(transport, wire, 5.0)
    _, pipeline = build(over, "staged", exchange="two-level")

    def data():
        for number, ids in enumerate(colliding(0.3, steps=8)):
            if number == 5 and over.rank == 3:
                os._exit(1)
            yield share_of(batch_of(ids, number), over)

    list(pipeline.run(data()))


@pytest.mark.parametrize("wire", ["process group", "shared memory"])
def test_a_lost_rank_is_an_error_on_all_others(wire):
    for error, _ in gather_ranks(4, _dies, wire, lost=[3], timeout=60)[:3]:
        assert error is not None and "died or fell silent" in error


def _train(transport, schedule, exchange, machines):
    transport.machines = machines
    return train(transport, schedule, colliding(0.4, steps=6), exchange=exchange)


def test_without_machines_of_several_ranks_it_is_flat():
    alone, each = [0, 0, 0], [0, 1, 2]
    assert not is_two_level("two-level", alone) and not is_two_level("two-level", each)
    (losses, expected), *_ = run_ranks(3, _train, "serial", "flat", alone)
    for machines in (alone, each):
        actual_losses, actual = run_ranks(3, _train, "staged", "two-level", machines)[0]
        assert actual_losses == losses
        assert all(torch.equal(actual[name], value) for name, value in expected.items())


def _resume(transport, folder):
    """What each choice becomes when it goes on from a two-level checkpoint, and from one of an
    earlier version."""
    in_pieces()
    batches = [share_of(batch_of(ids, n), transport) for n, ids in enumerate(colliding(0.4, 4))]

    def begin(exchange, machines=(0, 0, 1)):
        transport.machines = machines
        return build(transport, "serial", exchange=exchange)

    def load(begun):
        parallel, pipeline = begun
        try:
            checkpoints.load(checkpoints.latest(), parallel, pipeline.optimizer)
            return parallel.tables.exchange
        except ValueError as error:
            return str(error)

    def place(begun):
        list(begun[1].run(batches))
        return begun

    first = place(begin("two-level"))
    checkpoints = Checkpoints(folder, transport)
    path = checkpoints.save(first[0], first[1].optimizer, {"step": 4})
    found = {name: load(begin(name)) for name in ("auto", "flat", "two-level")}
    found["placed"] = load(place(begin("flat")))
    found["placed on one machine"] = load(place(begin("flat", (0, 0, 0))))
    if transport.rank == 0:
        state = json.loads((path / "state.json").read_text())
        assert state.pop("exchange") == "two-level" and state.pop("checksum")
        write_state(path, state)
    transport.gather_bytes(b"")
    return found | {"before": load(begin("auto"))}


def test_a_checkpoint_keeps_its_exchange(tmp_path):
    for found in run_ranks(3, _resume, str(tmp_path)):
        kept = "two-level", "as in the checkpoint"
        assert found["auto"] == found["two-level"] == found["placed on one machine"] == kept
        assert "'flat', but the checkpoint was trained with 'two-level'" in found["flat"]
        assert "in another order than 'flat': pass exchange='two-level'" in found["placed"]
        assert found["before"] == ("flat", "as in the checkpoint")
