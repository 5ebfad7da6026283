"""A checkpoint's metadata is a pickle: whatever it holds, nothing but metadata is built, and no
class or function is changed."""

from __future__ import annotations

import pickle
from pathlib import Path, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.filesystem import _StorageInfo

from freescale.train.torch_files.safe_reader import SafeReader

# the state (None, {"name": "../.."}), which BUILD hands to setattr
NAME = b"(N(dVname\nV../../../../etc/passwd\nst"
PASSWORDS = "../../../../etc/passwd"


def read(folder: Path, payload: bytes):
    (folder / ".metadata").write_bytes(payload)
    return SafeReader(folder).read_metadata()


METADATA = b"ctorch.distributed.checkpoint.metadata\n"
PICKLES = {
    "a class of Python's": b"cpathlib\nPurePosixPath\n" + NAME + b"b0(dVa\nVb\ns.",
    "a class of the metadata's": METADATA + b"MetadataIndex\n" + NAME + b"b.",
    "its __dict__": METADATA + b"StorageMeta\n(dVname\nVx\nsb.",
    "a function": b"ctorch.serialization\n_get_layout\n" + NAME + b"b.",
    "a dtype": b"ctorch\nfloat32\n" + NAME + b"b.",
    "a call of a dtype": b"ctorch\nfloat32\n(VA\ntR.",
    "an instance of what is no metadata": b"cpathlib\nPurePosixPath\n(Va\ntR" + NAME + b"b.",
    "a field that is none": METADATA + b"StorageMeta\n)\x81(dVname\nVx\nsb.",
    "the class of an instance": METADATA + b"StorageMeta\n)\x81(dV__class__\nctorch\nSize\nsb.",
    "properties by name": METADATA + b"TensorProperties\n)\x81(dVdtype\nVx\nsb.",
    "OBJ": b"(" + METADATA + b"StorageMeta\no.",
    "INST": b"(itorch.distributed.checkpoint.metadata\nStorageMeta\n.",
    "NEWOBJ_EX": METADATA + b"StorageMeta\n)}\x92.",
    "NEWOBJ with arguments": METADATA + b"StorageMeta\n(Va\nt\x81.",
    "EXT1": b"\x82\x01.",
    "a persistent id": b"Vx\nQ.",
    "a function of torch's": b"ctorch\nfrombuffer\n.",
    "eval": b"cbuiltins\neval\n(V1\ntR.",
}


@pytest.mark.parametrize("payload", PICKLES.values(), ids=PICKLES.keys())
def test_a_pickle_changes_and_calls_nothing(payload, tmp_path):
    before = [dict(vars(known)) for known in (PurePosixPath, meta.MetadataIndex, meta.StorageMeta)]
    with pytest.raises(ValueError, match=r"refused$"):
        read(tmp_path, payload)
    assert [
        dict(vars(known)) for known in (PurePosixPath, meta.MetadataIndex, meta.StorageMeta)
    ] == before
    assert not hasattr(torch.serialization._get_layout, "name")


@pytest.fixture
def saved(tmp_path):
    dcp.save(
        {"a": torch.arange(6.0).view(2, 3)},
        storage_writer=dcp.FileSystemWriter(tmp_path),
        no_dist=True,
    )
    return tmp_path


def rewritten(folder: Path, change) -> bytes:
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    return pickle.dumps(metadata)


def test_what_torch_writes_is_read(saved):
    found = SafeReader(saved).read_metadata()
    with open(saved / ".metadata", "rb") as file:
        expected = pickle.load(file)
    assert (
        found.state_dict_metadata == expected.state_dict_metadata
        and found.storage_data == expected.storage_data
    )
    tensors = {"a": torch.empty(2, 3)}
    dcp.load(tensors, storage_reader=SafeReader(saved), no_dist=True)
    assert torch.equal(tensors["a"], torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize("place", [PASSWORDS, "..", "/etc/passwd", "a/b", PurePosixPath("a"), 3])
def test_files_outside_the_folder_are_refused(saved, place):
    def elsewhere(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = place

    with pytest.raises(ValueError, match="outside it .*: refused"):
        read(saved, rewritten(saved, elsewhere))


def _of_bytes(metadata):
    metadata.state_dict_metadata["a"] = _StorageInfo("a", 0, 1)


def _nowhere(metadata):
    metadata.storage_data = {key: "a" for key in metadata.storage_data}


@pytest.mark.parametrize("change", [_of_bytes, _nowhere])
def test_entries_of_another_kind_are_refused(saved, change):
    with pytest.raises(ValueError, match="refused"):
        read(saved, rewritten(saved, change))


@pytest.mark.parametrize(
    "payload", [b"", b"garbage", METADATA + b"Metadata\n)\x81.", b"N."], ids=range(4)
)
def test_what_is_no_metadata_is_one_line(saved, payload):
    with pytest.raises(ValueError, match="damaged|no metadata"):
        read(saved, payload)
