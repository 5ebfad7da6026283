"""TorchRec as a peer. Its arms lie in the repository, under benchmarks/peers/torchrec, and run in
an environment of their own (.venv-peer), because its kernels fit one version of torch each."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freescale_bench.common.repository import find_repository, package_path

if TYPE_CHECKING:
    import torch

    from freescale.config import RunConfig
    from freescale_bench.common.workload import Workload

_ABSENT = "TorchRec's arms lie in the repository, under benchmarks/peers/torchrec"


def has_torchrec() -> bool:
    """Whether this environment has TorchRec, and the repository that holds its arms."""
    found = importlib.util.find_spec("torchrec")
    return found is not None and found.origin is not None and find_repository() is not None


def has_pec() -> bool:
    """Whether that TorchRec has TrainPipelinePEC: from 1.9 on."""
    found = importlib.util.find_spec("torchrec")
    if not has_torchrec() or found is None:
        return False
    return (
        Path(str(found.origin)).parent / "distributed/train_pipeline/pec_train_pipeline.py"
    ).exists()


def continue_in_peer(name: str, arguments: Sequence[str]) -> int | None:
    """Runs benchmark `name` in the environment that has TorchRec, which is set up first.

    Returns:
        Its exit status. None if this environment has TorchRec, or if there is no repository: the
        benchmark goes on in this process then, in the second case without TorchRec's arms, and a
        line says so.
    """
    if has_torchrec():
        return None
    root = find_repository()
    if root is None:
        print(f"{_ABSENT}: they are left out", flush=True)
        return None
    command = [set_up_peer(root), "-m", f"freescale_bench.{name}", *arguments]
    environment = {**os.environ, "PYTHONPATH": package_path()}
    return subprocess.run(command, env=environment, check=False).returncode


def set_up_peer(root: Path) -> str:
    """The interpreter of .venv-peer, which has TorchRec; made or brought up to date first.

    Raises:
        ValueError: TorchRec cannot be set up.
    """
    print("setting TorchRec up in .venv-peer (the first time takes a minute or two)", flush=True)
    setup = root / "benchmarks" / "peers" / "torchrec" / "setup.sh"
    if subprocess.run(["bash", str(setup)], check=False).returncode:
        raise ValueError(
            "TorchRec could not be set up; `freescale bench ladder --short` does without it"
        )
    return str(root / ".venv-peer" / "bin" / "python")


def build_torchrec(
    workload: Workload,
    rank: int,
    world: int,
    pipeline: str,
    *,
    device: torch.device | str = "cpu",
    deduplicate: bool = False,
    ledger: bool = True,
    cache: float | None = None,
) -> Any:
    """One rank of a TorchRec pipeline on `workload`.

    Args:
        pipeline: `base`, `sparse_dist`, `sparse_dist_late`, `prefetch_sparse_dist`, `semi_sync` or,
            on CPU, `pec`.
        deduplicate: every id is sent once, which TorchRec leaves to its user.
        cache: the table is in unified memory, behind a cache on the GPU of this share of it.
        ledger: its collectives go through FreeScale's ledger.
    """
    # TorchRec's tracing makes torch.fx warn on every start.
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    arm = _import_arms("torchrec_arms").build(
        workload, rank, world, pipeline, deduplicate=deduplicate, device=device, cache=cache
    )
    return _import_arms("ledgered").Ledgered(arm, rank) if ledger else arm


def build_torchrec_dlrm(
    shape: Any, rank: int, world: int, pipeline: str, device: torch.device | str = "cpu"
) -> Any:
    """One rank of a TorchRec pipeline that trains DLRM. `shape`: a `Shape` of
    `freescale_bench.torchrec.dlrm`; `pipeline`: as in `build_torchrec`."""
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    _import_arms("torchrec_arms")  # before TorchRec: it silences its warnings
    arm = _import_arms("dlrm_arms").build(shape, rank, world, pipeline, device)
    return _import_arms("ledgered").Ledgered(arm, rank)


def build_torchrec_retrieval(
    config: RunConfig, histories: Path, pipeline: str, *, device: torch.device, batches: int
) -> Any:
    """One rank of a TorchRec pipeline that trains the model of `config` on a histories file, as
    `freescale train` would. `pipeline`: as in `build_torchrec`; `batches`: that are trained, or
    fetched ahead, at most."""
    _import_arms("torchrec_arms")  # before TorchRec: it silences its warnings
    arm = _import_arms("retrieval_arms").build(config, histories, pipeline, device, batches)
    return _import_arms("ledgered").Ledgered(arm, arm.rank)


def _import_arms(module: str) -> Any:
    """A module of benchmarks/peers/torchrec: the only folder that is put on the path."""
    root = find_repository()
    if root is None:
        raise ValueError(f"{_ABSENT}: run this from a clone of it")
    folder = str(root / "benchmarks" / "peers" / "torchrec")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(module)
