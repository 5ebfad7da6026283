"""TorchRec as a peer. Its arms are in the repository, under benchmarks/peers/torchrec. They run in
a separate environment (.venv-peer), because its kernels need a specific version of torch."""

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

_ABSENT = "TorchRec's arms are in the repository, under benchmarks/peers/torchrec"


def has_torchrec() -> bool:
    """Whether this environment has TorchRec, and the repository with its arms."""
    found = importlib.util.find_spec("torchrec")
    return found is not None and found.origin is not None and find_repository() is not None


def require_torchrec() -> None:
    """Raises ValueError without TorchRec."""
    if not has_torchrec():
        raise ValueError(
            "TorchRec is not installed: on GPUs, install torchrec 1.6.1 and fbgemm-gpu 1.6.0 on "
            "torch 2.11"
        )


def has_pec() -> bool:
    """Whether TorchRec has TrainPipelinePEC (1.9 and later)."""
    found = importlib.util.find_spec("torchrec")
    if not has_torchrec() or found is None:
        return False
    return (
        Path(str(found.origin)).parent / "distributed/train_pipeline/pec_train_pipeline.py"
    ).exists()


def continue_in_peer(name: str, arguments: Sequence[str]) -> int | None:
    """Sets up the environment with TorchRec, and runs benchmark `name` in it.

    Returns:
        Its exit status. None if this environment has TorchRec, or if there is no repository. The
        benchmark then continues in this process. In the latter case a message says that TorchRec's
        arms are left out.
    """
    if has_torchrec():
        return None
    root = find_repository()
    if root is None:
        print(f"{_ABSENT}: left out", flush=True)
        return None
    command = [set_up_peer(root), "-m", f"freescale_bench.{name}", *arguments]
    environment = {**os.environ, "PYTHONPATH": package_path()}
    return subprocess.run(command, env=environment, check=False).returncode


def set_up_peer(root: Path) -> str:
    """Creates or updates .venv-peer, the environment with TorchRec. Returns its interpreter.

    Raises:
        ValueError: TorchRec cannot be set up.
    """
    print("setting TorchRec up in .venv-peer (the first time takes a minute or two)", flush=True)
    setup = root / "benchmarks" / "peers" / "torchrec" / "setup.sh"
    if subprocess.run(["bash", str(setup)], check=False).returncode:
        raise ValueError(
            "TorchRec could not be set up; `freescale bench ladder --short` does not need it"
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
    """Builds one rank of a TorchRec pipeline on `workload`.

    Args:
        pipeline: `base`, `sparse_dist`, `sparse_dist_late`, `prefetch_sparse_dist`, `semi_sync` or,
            on CPU, `pec`.
        deduplicate: send every id once, which TorchRec leaves to its user.
        cache: keep the table in unified memory, with this share of it cached on the GPU.
        ledger: record its collectives in FreeScale's ledger.
    """
    arm = _import_arms("torchrec_arms").build(
        workload, rank, world, pipeline, deduplicate=deduplicate, device=device, cache=cache
    )
    return _import_arms("ledgered").Ledgered(arm, rank) if ledger else arm


def build_torchrec_dlrm(
    shape: Any, rank: int, world: int, pipeline: str, device: torch.device | str = "cpu"
) -> Any:
    """Builds one rank of a TorchRec pipeline that trains DLRM. `shape`: a `Shape` of
    `freescale_bench.torchrec.dlrm`; `pipeline`: as in `build_torchrec`."""
    _import_arms("torchrec_arms")  # before TorchRec: it silences its warnings
    arm = _import_arms("dlrm_arms").build(shape, rank, world, pipeline, device)
    return _import_arms("ledgered").Ledgered(arm, rank)


def build_torchrec_retrieval(
    config: RunConfig, histories: Path, pipeline: str, *, device: torch.device, batches: int
) -> Any:
    """Builds one rank of a TorchRec pipeline that trains the model of `config` on a histories file,
    like `freescale train`. `pipeline`: as in `build_torchrec`; `batches`: the most that are trained
    or prefetched."""
    _import_arms("torchrec_arms")  # before TorchRec: it silences its warnings
    arm = _import_arms("retrieval_arms").build(config, histories, pipeline, device, batches)
    return _import_arms("ledgered").Ledgered(arm, arm.rank)


def _import_arms(module: str) -> Any:
    """Imports a module of benchmarks/peers/torchrec."""
    root = find_repository()
    if root is None:
        raise ValueError(f"{_ABSENT}: run this from a clone of it")
    # TorchRec's tracing makes torch.fx warn on every start.
    logging.getLogger("torch.fx").setLevel(logging.ERROR)
    folder = str(root / "benchmarks" / "peers" / "torchrec")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(module)
