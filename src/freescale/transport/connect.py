"""Joins the ranks: from torchrun's environment, or as a single process when there is none."""

from __future__ import annotations

import os
import secrets
import sys
import time
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from freescale.config import TrainConfig
from freescale.ledger.ledger import Ledger
from freescale.transport.api import Transport, TransportError, gather_json
from freescale.transport.choice import (
    FORMER,
    choose_transport,
    depends_on_engine,
    explain_fallback,
    find_rdma_devices,
    is_ucx_installed,
)
from freescale.transport.descriptors import check_limit, raise_limit
from freescale.transport.hostwire.bindings import explain_missing_engine
from freescale.transport.hostwire.transport import HostwireTransport
from freescale.transport.local import LocalTransport
from freescale.transport.machine import identify_machine
from freescale.transport.process_group import ProcessGroupTransport
from freescale.transport.shared_gpu import PART, GpuBusy, is_divided, list_settings
from freescale.transport.signs_of_life import SignsOfLife, choose_limit

# seconds that the first rank waits for the last: machines prepare their data at different speeds
_JOIN_SECONDS = 600.0
# Ranks from which on gloo connects two of them when they first talk: to connect all with all at the
# start keeps the rank that has the store busy for the square of their number.
LAZY_FROM = 32
_LAZY = "TORCH_GLOO_LAZY_INIT"
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torchrun's: ranks make a store of their own
_LOOK = 0.02  # seconds between two looks for ranks that have come


def choose_device(device: str, local_rank: int, local_world: int) -> torch.device:
    """The device of a rank. `auto` takes a GPU per local rank, the CPU if there is no GPU. Ranks
    share GPUs that MPS divides. ValueError if there are too few GPUs, or `device` is unknown."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and gpus == 0):
        return torch.device("cpu")
    if device not in ("auto", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, not {device!r}")
    if gpus == 0:
        raise ValueError(
            "--device cuda, but torch finds no GPU on this machine: pass --device cpu "
            "(freescale doctor shows what torch finds)"
        )
    if gpus < local_world and not is_divided():
        raise ValueError(
            f"{local_world} ranks on this machine, but it has {gpus} GPU{'s' * (gpus > 1)} and "
            f"each rank needs its own: start {gpus} (--nproc {gpus}), or pass --device cpu; ranks "
            f"share a GPU where CUDA's MPS runs and {PART} says what part each of them gets"
        )
    return torch.device("cuda", local_rank % gpus)


def take_gpu(device: torch.device) -> None:
    """Makes a GPU the current one. GpuBusy if another process, maybe of a run before, has it."""
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        if "busy or unavailable" not in str(error):
            raise
        raise GpuBusy(
            f"{device} is busy: another process has it (nvidia-smi shows which) or has just left "
            "it, or CUDA's MPS has to be started again"
        ) from error


def connect(
    device: str | torch.device = TrainConfig.device,
    timeout: float = TrainConfig.timeout,
    transport: str = TrainConfig.transport,
) -> Transport:
    """Joins all ranks of a run. A collective.

    Under torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ... are set) it initialises torch's process group
    and joins the ranks; a process group that exists already is used as it is. A process that was
    started alone gets a transport of one rank.

    Args:
        device: auto (a GPU for each local rank where there is any), cpu, cuda, or a torch.device.
        timeout: seconds after which a rank that does not take part in a collective has been named,
            on all others.
        transport: auto, collective, hostwire-tcp or hostwire-ucx.

    Returns:
        The transport; its `about` says which it is and why.

    Raises:
        ValueError: there is no such device or transport, or a rank may not open as many files as
            the transport takes.
        TransportError: the ranks do not reach each other, or one cannot open what the transport
            needs.
    """
    if transport in FORMER:
        former, transport = transport, FORMER[transport]
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        _print_on_first(f"transport {former} is now {transport}: replace the name", rank)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    chosen = device
    if not isinstance(chosen, torch.device):
        chosen = choose_device(chosen, local_rank, local_world)
    if chosen.type == "cuda":
        if torch.cuda.device_count() < local_world:
            os.environ.update(list_settings(local_rank, local_world, shared=True))
        take_gpu(chosen)
    if dist.is_initialized():
        return _join(chosen, timeout, transport, owner=False)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return LocalTransport(chosen, Ledger(chosen))
    check_limit(
        transport,
        chosen.type,
        int(os.environ["WORLD_SIZE"]),
        local_world,
        raise_limit(),
        int(os.environ["RANK"]),
    )
    if int(os.environ["WORLD_SIZE"]) >= LAZY_FROM:
        os.environ.setdefault(_LAZY, "1")
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    try:
        soon, longest = (timedelta(seconds=s) for s in (timeout, max(timeout, _JOIN_SECONDS)))
        dist.init_process_group(backend, timeout=longest, **_open_store(soon, longest))
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).splitlines()[0]
        raise TransportError(
            f"rank {os.environ['RANK']} could not join the others at {where}: {reason}"
        ) from error
    return _join(chosen, timeout, transport, owner=True)


def _open_store(soon: timedelta, longest: timedelta) -> dict[str, Any]:
    """Arguments of init_process_group: if torchrun's agent keeps the store for all attempts, a part
    of it for this one. The agent's store answers `soon`, because it is there before the ranks are
    started; all ranks have come after the `longest`."""
    if not shares_store(os.environ):
        return {}
    warning = warn_of_shared_store(os.environ)
    try:
        store, rank, world = next(rendezvous("env://", timeout=soon))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise RuntimeError(f"torchrun's store does not answer; {warning or reason}") from error
    if warning and rank == 0:
        warnings.warn(warning, stacklevel=3)
    store.set_timeout(longest)
    own = meet(store, rank, world, longest.total_seconds())
    return {"store": own, "rank": rank, "world_size": world}


def shares_store(environment: Mapping[str, str]) -> bool:
    """Whether torchrun's agent keeps the store where the ranks meet."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def warn_of_shared_store(environment: Mapping[str, str]) -> str | None:
    """What ranks over several machines that torchrun starts again should know. None: nothing.
    torchrun's first agent says only once where its store is: an agent that comes later, because its
    machine was lost, waits for word of it; if it was the first, others use a store that is gone."""
    several = int(environment["WORLD_SIZE"]) > int(environment.get("LOCAL_WORLD_SIZE", "1"))
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    set_already = environment.get(_OWN_STORE) == "1"  # the static rendezvous ignores it
    if set_already or not (shares_store(environment) and several and restarts):
        return None
    return (
        "a machine whose torchrun is started again cannot join the others of a c10d rendezvous, "
        f"whose store they share: set {_OWN_STORE}=1 where torchrun starts, on all machines"
    )


def meet(store: Store, rank: int, world: int, seconds: float) -> Store:
    """Waits for all ranks of this attempt. A collective. Returns the store, which all ranks and
    attempts share, with keys of this attempt alone. TransportError if not all come in time.

    torchrun's agents keep one store for all attempts at a run, and the addresses of ranks that are
    gone are still in it. So ranks agree on a name that no other attempt has:

        rank 0                                  other ranks
        takes the next number                   hello/RANK = a word that nobody used before
        answers every hello it finds    ->      welcome/WORD = the attempt's name
        waits until all have joined     <-      joined + 1

    A hello of an earlier attempt may be answered, too: nobody reads it.
    """
    rooms = PrefixStore("freescale", store)
    if rank != 0:
        word = secrets.token_hex(8)
        rooms.set(f"hello/{rank}", word)
        rooms.wait([f"welcome/{word}"], timedelta(seconds=seconds))
        name = rooms.get(f"welcome/{word}").decode()
        rooms.add(f"{name}/joined", 1)
        return PrefixStore(name, rooms)
    name = f"attempt-{rooms.add('attempts', 1)}"
    answered: dict[int, str] = {}
    end = time.monotonic() + seconds
    while (joined := rooms.add(f"{name}/joined", 0)) < world - 1:
        if time.monotonic() > end:
            raise TransportError(
                f"rank 0 waited {seconds:.0f} s for the others: {joined + 1} of {world} ranks came"
            )
        for other in range(1, world):
            if rooms.check([f"hello/{other}"]):
                word = rooms.get(f"hello/{other}").decode()
                if answered.get(other) != word:
                    answered[other] = word
                    rooms.set(f"welcome/{word}", name)
        time.sleep(_LOOK)
    return PrefixStore(name, rooms)


def _join(
    device: torch.device, timeout: float, transport: str, owner: bool
) -> ProcessGroupTransport:
    """Makes groups of our own for the step's tensors and for control traffic: the two never mix,
    and the limit that follows from `timeout` holds for both."""
    limit = timedelta(seconds=choose_limit(timeout, dist.get_world_size()))
    raise_limit()  # before connections are made
    # NCCL meets here, once: in torch's default group it would do so first, for nobody.
    bound = dist.distributed_c10d._get_default_group().bound_device_id
    meets = device if device.type == "cuda" and bound is None else None
    group = dist.new_group(timeout=limit, device_id=meets)
    control = dist.new_group(timeout=limit, backend="gloo")
    made = ProcessGroupTransport(
        device, Ledger(device), group=group, control=control, owner=owner, timeout=limit
    )
    chosen, why, machines = agree_on_transport(transport, made)
    if chosen != "collective":
        made = HostwireTransport(
            device,
            made.ledger,
            group,
            control,
            chosen.removeprefix("hostwire-"),
            owner=owner,
            timeout=limit,
        )
    made.machines, made.rdma = machines, chosen == "hostwire-ucx"
    made.about = f"transport {chosen} ({why})"
    if owner:
        shared = shares_store(os.environ)
        store = dist.distributed_c10d._get_default_store()
        made.signs = SignsOfLife(store, made.rank, made.world, None if shared else 0)
    return made


def agree_on_transport(transport: str, made: ProcessGroupTransport) -> tuple[str, str, list[int]]:
    """Chooses the transport of ranks that have joined, by what all of them have: they may have
    different packages and devices. A collective. Returns its name, the reason, and the machine of
    each rank. ValueError, on all ranks, if one may not open enough files."""
    needs_engine = depends_on_engine(transport)
    here = [
        identify_machine().hex(),
        raise_limit(),
        is_ucx_installed(),
        bool(find_rdma_devices()),
        explain_missing_engine() if needs_engine else "",
    ]
    machines, limits, ucx, rdma, missing = zip(*gather_json(made, here), strict=True)
    names = list(dict.fromkeys(machines))
    device, count = made.device.type, len(names)
    engine = needs_engine and not any(missing)
    chosen, why = choose_transport(transport, device, count, all(ucx), all(rdma), engine)
    if chosen == "collective" and needs_engine:
        _print_on_first(explain_fallback(missing), made.rank)
    for rank, most in enumerate(limits):
        check_limit(chosen, device, made.world, machines.count(machines[rank]), most, rank)
    return chosen, why, [names.index(machine) for machine in machines]


def _print_on_first(line: str, rank: int) -> None:
    if rank == 0:
        print(f"freescale: {line}", file=sys.stderr)
