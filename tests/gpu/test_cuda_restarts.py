"""Ranks on a GPU that are forked from a process which has imported torch."""

from __future__ import annotations

import json

import pytest
import torch
from helpers.rank_servers import find_path, start_forked, start_server

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

_ASKS = """
import os

if "RANK" not in os.environ:
    import torch

    torch.cuda.init()
"""


def test_forked_ranks_compute_on_the_gpu(tmp_path):
    server = start_server()
    try:
        ranks = [start_forked(server, tmp_path / name, "compute") for name in "ab"]
        assert [rank.wait(120) for rank in ranks] == [0, 0], ranks[0].stderr.read()
    finally:
        server.close()
    for name in "ab":
        said = json.loads((tmp_path / f"{name}.json").read_text())
        assert said["same"]["CUDA"] == [False, False]


def test_ranks_compute_though_something_imported_has_asked_for_gpus(tmp_path):
    """CUDA does not survive a fork: such a rank becomes a new process."""
    (tmp_path / "sitecustomize.py").write_text(_ASKS)
    told = {"PYTHONPATH": f"{tmp_path}:{find_path()}"}
    server = start_server(**told)
    try:
        rank = start_forked(server, tmp_path / "said", "compute", **told)
        assert rank.wait(120) == 0, rank.stderr.read()
    finally:
        server.close()
