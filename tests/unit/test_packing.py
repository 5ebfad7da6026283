"""Nested values become JSON and named tensors, and come back as they were, each tensor where it
was."""

from __future__ import annotations

import enum
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from freescale.train.state.packing import Unpacker, pack
from freescale.train.torch_files.safe_reader import SafeReader

CPU, THERE = torch.device("cpu"), torch.device("meta")  # stands for a GPU: unpacker needs no values
SUMS = [torch.tensor(2.0), {"a": torch.ones(2, 3).half()}]
VALUE = {"step": 3, "nothing": None, 7: ("text", True, 0.1 + 0.2, 1 << 70), "sums": SUMS}


@pytest.fixture
def saved(tmp_path):
    tensors = {}
    packed = json.loads(json.dumps(pack(VALUE, "of", tensors)))
    assert list(tensors) == ["of/sums/0", "of/sums/1/a"]
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    return packed, tmp_path


def test_what_is_packed_comes_back(saved):
    packed, path = saved
    unpacker = Unpacker({}, SafeReader(path).list_tensors(), CPU)
    value = unpacker.unpack(packed)
    dcp.load(unpacker.tensors, storage_reader=SafeReader(path), no_dist=True)
    (number, inner), (expected, expected_inner) = value.pop("sums"), VALUE["sums"]
    assert (
        value == {key: kept for key, kept in VALUE.items() if key != "sums"}
        and type(value[7]) is tuple
    )
    assert torch.equal(number, expected) and number.dtype == expected.dtype
    assert torch.equal(inner["a"], expected_inner["a"]) and inner["a"].dtype == torch.float16


@pytest.mark.parametrize(
    ("state", "options", "expected"),
    [
        pytest.param({}, {}, (CPU, THERE), id="saved on a CPU: numbers stay on the host"),
        pytest.param(
            {}, {"never_on_host": True}, (THERE, THERE), id="saved on a CPU, never on host"
        ),
        pytest.param({"on_host": []}, {}, (THERE, THERE), id="none on host"),
        pytest.param({"on_host": ["of/sums/1/a"]}, {}, (THERE, CPU), id="one on host"),
        pytest.param(
            {"on_host": ["of/sums/0"]},
            {"never_on_host": True},
            (THERE, THERE),
            id="one on host, never on host",
        ),
    ],
)
def test_tensors_are_where_they_were(saved, state, options, expected):
    packed, path = saved
    number, inner = Unpacker(state, SafeReader(path).list_tensors(), CPU).unpack(
        packed, THERE, **options
    )["sums"]
    assert (number.device, inner["a"].device) == expected


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        pytest.param(object(), "a/b is a object, which a checkpoint cannot hold", id="object"),
        pytest.param({1.5: 2}, "a/b is a dict", id="dict with a float key"),
        pytest.param([{"x": {1, 2}}], "a/b/0/x is a set", id="set"),
        pytest.param(Colour.RED, "a/b is a Colour", id="enum"),
        pytest.param(
            torch.ones(2).to_sparse(),
            "a/b is a tensor of layout torch.sparse_coo",
            id="sparse tensor",
        ),
        pytest.param(
            {1: torch.ones(1), "1": torch.ones(1)},
            ("two tensors of a checkpoint would have the name a/b/1"),
            id="two tensors of one name",
        ),
    ],
)
def test_what_cannot_be_held_is_refused_by_name(value, said):
    with pytest.raises(ValueError, match=said):
        pack(value, "a/b", {})


def test_a_tensor_that_is_not_there_is_said(saved):
    _, path = saved
    with pytest.raises(ValueError, match="no tensor of/other"):
        Unpacker({}, SafeReader(path).list_tensors(), CPU).unpack({"tensor": "of/other"})
