"""Host and disk tables on a GPU: through pinned buffers, beside the compute, the bits of tables on
the device."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from helpers.cache_copies import check_copies
from helpers.gpu_training import train

import freescale
from freescale.embedding.host_tables import copies, homes
from freescale.embedding.optimizers import ROW_OPTIMIZERS
from freescale.pipeline.staged import Staged
from freescale.transport.local import LocalTransport

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ITEMS = 3000  # a batch reads about 340 of them: rows leave the cache and come back


def bytes_of(rows, optimizer, dtype, width=8):
    shapes = ROW_OPTIMIZERS[optimizer]().state_shapes(width).values()
    return rows * dtype.itemsize * (width + sum(torch.Size(shape).numel() for shape in shapes))


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "not pinned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # Triton's kernels, plain torch's
@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_bit_equal_to_tables_on_the_device(optimizer, dtype, pinned, tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "_BUFFER_BYTES", 4096)  # many pieces
    if not pinned:
        monkeypatch.setattr(homes.Home, "pin", lambda home: "not in this test")
    options = {"optimizer": optimizer, "dtype": dtype, "items": ITEMS}
    losses, expected = train(LocalTransport("cuda"), "serial", **options)
    cache = bytes_of(1250, optimizer, dtype)
    for schedule, tier in (
        ("serial", freescale.Host(cache, direct=True)),
        (Staged, freescale.Host(cache)),
        (Staged, freescale.Host(cache, direct=True)),
        ("staged", freescale.Host(cache, direct=True)),  # of one rank: single.py
        ("staged", freescale.Host(cache)),
        ("staged", freescale.Disk(str(tmp_path), cache)),
    ):
        placement = {"item": tier, "action": "sharded"}
        refused = not pinned and isinstance(tier, freescale.Host) and tier.direct
        with pytest.warns(UserWarning, match="not in this test") if refused else nullcontext():
            found, own = train(LocalTransport("cuda"), schedule, placement=placement, **options)
        assert found == losses
        assert [name for name in expected if not torch.equal(own[name], expected[name])] == []


@pytest.mark.parametrize("shape", [(7,), ()], ids=["rows", "one value a row"])
def test_copies_in_pieces(shape, monkeypatch):
    monkeypatch.setattr(copies, "_BUFFER_BYTES", 256)
    check_copies(copies.PinnedCopies(7 * 4), shape, "cuda")


def test_memory_is_pinned_for_as_long_as_its_home_lives():
    tensor = torch.zeros(1 << 20)
    home = homes.Home({"rows": tensor, "none": torch.zeros(0)})
    assert home.pin() == "" and tensor.is_pinned()
    again = homes.Home({"other": torch.zeros(1 << 20), "rows": tensor})
    assert "already" in again.pin() and not again.tensors["other"].is_pinned()
    del home
    assert not tensor.is_pinned()


def test_a_table_that_does_not_fit_goes_to_the_host(monkeypatch):
    """With a device that says it is small."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 20, 1 << 20))
    module = torch.nn.ModuleDict({"item": torch.nn.Embedding(10_000, 64, device="meta")})
    sharded = freescale.parallelize(module, {"item": ["history"]}, transport=LocalTransport("cuda"))
    sharded.tables.place()
    (line,) = sharded.tables.describe()
    assert "host memory, cache 524.3 kB (tables need 7.7 MB of a rank's GPU" in line
