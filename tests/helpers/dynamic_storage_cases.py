"""Rows of a dynamic table whose map is on the device, beside one whose map is on the host: drawn,
updated, evicted, taken back and read. As a program: its Triton kernels through the interpreter, as
JSON."""

from __future__ import annotations

import json
from contextlib import ExitStack
from unittest import mock

import torch

from freescale.embedding.dynamic import drawn_rows
from freescale.embedding.dynamic.device_directory import DeviceDirectory
from freescale.embedding.dynamic.directory import Directory
from freescale.embedding.dynamic_rules import SHARDS, After
from freescale.embedding.layout import DynamicLayout, TableSpec
from freescale.embedding.optimizers import SGD, Adam, RowWiseAdagrad
from freescale.embedding.storage import dynamic as dynamic_storage
from freescale.embedding.storage.api import Counted, TableRange
from freescale.embedding.storage.device import DeviceStorage
from freescale.embedding.storage.dynamic import EXTRA_ROWS, DynamicStorage
from freescale.kernels.id_map import triton as triton_id_map
from freescale.ledger.ledger import Ledger
from helpers.dynamic_oracle import FineDynamic
from helpers.id_map_cases import by_kernels, draw_stream

WIDTH, WORLD, RANK = 12, 2048, 3  # two shards, whose turn to be swept comes soon


class PlainStorage(DynamicStorage):
    """Draws its rows in plain torch, also where there are kernels for it."""

    _draws_in_place = False


class Storages:
    """One decided on by the host, and one by the device, that see the same batches."""

    def __init__(self, rules, optimizer, device):
        self.both = [self._open(rules, optimizer(), torch.device(device), on) for on in (0, 1)]
        self.shards = DynamicLayout((self.both[0].spec,), WORLD).get_owned_shards(RANK)

    def _open(self, rules, optimizer, device, on_device):
        spec = TableSpec("item", rules.rows, WIDTH, torch.float32, ("ids",), None, rules)
        layout = DynamicLayout((spec,), WORLD)
        ranges = [TableRange(spec, 0, *layout.get_owned_range(0, RANK))]
        inner = DeviceStorage(ranges, layout.size + EXTRA_ROWS, optimizer, device)
        shards = layout.get_owned_shards(RANK)
        directory = Directory(rules, *shards)
        if on_device:
            directory = DeviceDirectory(rules, *shards, device)
        storage = (DynamicStorage if on_device else PlainStorage)(inner, directory)
        storage.initialise("item", seed=3, std=0.5)
        return storage

    def train(self, keys, counted, step):
        """A step of both."""
        for storage in self.both:
            device = storage.weight.device
            marks = None if counted is None else counted.to(device)
            slots = storage.resolve(keys.to(device), Ledger(), Counted(marks)).slots.unique()
            gradients = torch.sin(storage.gather(slots, torch.float32) * 7 + step)
            storage.begin()
            storage.update(storage.find_targets(slots), gradients, step=step, factor=0.1, clip=None)

    def look_ahead(self, keys):
        """A batch is made resident, taken back, made again and dropped."""
        same = True
        for storage in self.both:
            storage.resolve(keys.to(storage.weight.device), Ledger())
        for change in ("roll_back", "restore_ahead", "drop_ahead"):
            for storage in self.both:
                getattr(storage, change)()
            same &= self.agree(keys)
        return same

    def agree(self, keys):
        """Ids, rows and state of the entries that hold one, and what keys read."""
        host, device = ({n: v.cpu() for n, v in s.get_tensors("item").items()} for s in self.both)
        used = (host["last_use"] >= 0).nonzero().view(-1)
        read = [s.read(keys.to(s.weight.device), torch.float32).cpu() for s in self.both]
        return bool(
            torch.equal(host["last_use"], device["last_use"])
            and torch.allclose(*read, rtol=1e-4, atol=1e-4)
            and all(
                torch.allclose(v[used].double(), device[n][used].double(), rtol=1e-4, atol=1e-4)
                for n, v in host.items()
            )
        )


def compare(rules, optimizer, device="cpu"):
    """What held throughout a stream."""
    storages = Storages(rules, optimizer, device)
    held, evicted = {"steps": True, "ahead": True}, 0
    asked = torch.zeros(0, dtype=torch.int64)
    for step, (keys, counted) in enumerate(draw_stream(storages.shards, 20, 9, 16), start=1):
        storages.train(keys, counted, step)
        asked = torch.cat([asked, keys]).unique()
        held["steps"] &= storages.agree(asked)
        figures = storages.both[1].last_figures
        evicted += figures.evicted + figures.swept
        if step % 3 == 0:
            held["ahead"] &= storages.look_ahead(asked.flip(0)[:16])
    return held | {"evicted": evicted}


CASES = {
    "sgd": (FineDynamic(4 * SHARDS), SGD),
    "rowwise adagrad": (FineDynamic(4 * SHARDS, evict="lfu"), RowWiseAdagrad),
    "adam": (FineDynamic(4 * SHARDS), Adam),
    "after": (FineDynamic(6 * SHARDS, evict=After(3)), RowWiseAdagrad),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    triton_id_map.BLOCK = triton_id_map.SHARD_BLOCK = 32  # the interpreter is slow
    with ExitStack() as patches:
        patches.enter_context(by_kernels(triton_id_map))
        # Rows are exchanged back by plain torch, so that it is compared with, too.
        patches.enter_context(mock.patch.object(dynamic_storage, "fits_exchange", lambda _: True))
        # Of these few rows, too, some are in before it is known how many come.
        patches.enter_context(mock.patch.object(drawn_rows, "_ALIGNED", 1))
        print(json.dumps({name: compare(*case) for name, case in CASES.items()}))
