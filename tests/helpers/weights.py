"""The weights of a run, to be compared bit by bit."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from helpers.command import freescale


def read_weights(run: Path, out: Path) -> dict[str, bytes]:
    """By name. `out`: a new folder."""
    done = freescale("export", run, "--out", out)
    assert done.returncode == 0, done.stderr
    tensors = {}
    for path in sorted(out.rglob("*.safetensors")):
        tensors |= load_file(path)
    assert tensors
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
