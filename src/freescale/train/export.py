"""Exports a checkpoint as safetensors for serving: dense weights in one file, each table in its
own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from freescale.embedding.dynamic_rules import DEFAULT_ID, LEARNED
from freescale.embedding.layout import spread_ids
from freescale.stores.path import as_path, writing
from freescale.train.state.intact import Intact, verify_checkpoint
from freescale.train.state.restore import TablePart, apply_deltas, read_tensors
from freescale.train.torch_files.safe_reader import SafeReader
from freescale.transport.local import LocalTransport

_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def export(
    checkpoint: str | Path | Intact, folder: str | Path, *, overwrite: bool = False
) -> list[Path]:
    """Writes a checkpoint as safetensors for serving. Not a collective: call it on one rank.

    Args:
        checkpoint: a result of `Checkpoints.save`, `latest` or `last_intact`.
        folder: where the files go; created if missing.
        overwrite: whether to replace an export that the folder holds.

    Returns:
        The files: `dense.safetensors` (dense weights by parameter name) and
        `table.NAME.safetensors` (tensor `weight` [rows, width] in the order of ids) for each table;
        for a dynamic table also `ids` [rows], and if it is learned `default` [1, width], the row
        of all other ids.

    Raises:
        ValueError: the checkpoint is damaged or cannot be read, or the folder holds an export.
    """
    found = as_path(checkpoint) if isinstance(checkpoint, str) else checkpoint
    out = as_path(folder)
    if not overwrite:
        refuse_export(out, "overwrite=True")
    with writing(out, "dense.safetensors") as place:
        return [out / path.relative_to(place) for path in export_checkpoint(found, place)]


def refuse_export(out: Path, option: str) -> None:
    if (out / "dense.safetensors").exists():
        raise ValueError(
            f"{out} already holds an export: name another folder, or pass {option} to replace it"
        )


def export_checkpoint(checkpoint: Path | Intact, out: Path) -> Iterator[Path]:
    """Writes the files of `export`, one by one. Removes tables of an earlier export that this
    checkpoint does not have."""
    if not isinstance(checkpoint, Intact):
        checkpoint = verify_checkpoint(checkpoint, LocalTransport())
    out.mkdir(parents=True, exist_ok=True)
    names = {f"table.{name}.safetensors" for name in checkpoint.state["tables"]}
    for stale in out.glob("table.*.safetensors"):
        if stale.name not in names:
            stale.unlink()
    for name, tensors in read_weights(checkpoint):
        yield write_tensors(tensors, out / f"{name}.safetensors")


def read_weights(checkpoint: Intact) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Reads the tensors of each file of `export`, by the file's name without its ending."""
    path, state = checkpoint.path, checkpoint.state
    dense = {
        f"dense/{name}": torch.empty(shape, dtype=_DTYPES[kind])
        for name, (shape, kind) in state["dense"].items()
    }
    _fill(dense, path)
    yield "dense", {name.removeprefix("dense/"): value for name, value in dense.items()}
    for name, (rows, width, kind, _, *dynamic) in state["tables"].items():
        if dynamic:
            tensors = _read_dynamic(checkpoint, name, rows)
            if LEARNED in dynamic:
                default, weight = tensors["ids"] == DEFAULT_ID, tensors["weight"]
                tensors = {part: tensor[~default] for part, tensor in tensors.items()}
                tensors["default"] = weight[default]
            yield f"table.{name}", tensors
            continue
        stored = torch.empty(rows, width, dtype=_DTYPES[kind])
        _fill({f"table/{name}/rows": stored}, checkpoint.base.path)
        apply_deltas(checkpoint.deltas, {name: TablePart(0, rows, {"rows": stored})})
        weight = stored.index_select(0, spread_ids(torch.arange(rows), rows))
        yield f"table.{name}", {"weight": weight}


def _read_dynamic(checkpoint: Intact, name: str, rows: int) -> dict[str, torch.Tensor]:
    """Reads `ids` [n] that have a row, ascending, and `weight` [n, width]."""
    names = {f"table/{name}/{part}": part for part in ("rows", "ids", "last_use")}
    stored = read_tensors(SafeReader(checkpoint.base.path), names.__contains__)
    parts = {names[label]: value.flatten(0, 1) for label, value in stored.items()}
    apply_deltas(checkpoint.deltas, {name: TablePart(0, rows, parts)})
    used = (parts["last_use"] >= 0).nonzero().view(-1)
    used = used[parts["ids"][used].argsort()]
    return {"ids": parts["ids"][used], "weight": parts["rows"].index_select(0, used)}


def _fill(tensors: dict[str, torch.Tensor], path: Path) -> None:
    if tensors:
        SafeReader(path).fill(tensors)


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> Path:
    from safetensors.torch import save_file

    temporary = path.with_suffix(".tmp")
    temporary.touch()
    mode = temporary.stat().st_mode  # follows the umask; save_file's files are for their owner only
    save_file(tensors, str(temporary))
    temporary.chmod(mode)
    temporary.replace(path)
    return path
