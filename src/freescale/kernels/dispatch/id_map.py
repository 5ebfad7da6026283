"""Chooses the version of the map from ids to rows, and of the sums of draws, for a device."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from freescale.kernels.dispatch.versions import runs_triton
from freescale.kernels.id_map import reference, triton, triton_draws
from freescale.kernels.id_map import reference as draws
from freescale.kernels.id_map.reference import IdMap


class IdMapVersion(Protocol):
    """The functions of `id_map.reference`. A version has its own types for the results about a
    batch (entries, missing ids, contents), which it passes to its other functions."""

    def allocate(
        self, shards: int, rows: int, first_shard: int, device: torch.device, bits: int
    ) -> IdMap: ...
    def find(self, map: IdMap, keys: Tensor, absent: int = -1) -> Tensor: ...
    def rebuild(self, map: IdMap) -> None: ...
    def look_up(self, *arguments: Any, **named: Any) -> Any: ...
    def find_again(self, *arguments: Any, **named: Any) -> None: ...
    def list_missing(self, *arguments: Any, **named: Any) -> Any: ...
    def order(self, *arguments: Any, **named: Any) -> Any: ...
    def count_room(self, *arguments: Any, **named: Any) -> Tensor: ...
    def place(self, *arguments: Any, **named: Any) -> tuple[Any, Tensor, Tensor]: ...
    def note(self, *arguments: Any, **named: Any) -> Any: ...
    def shorten(self, *arguments: Any, **named: Any) -> Any: ...
    def swap_uses(self, *arguments: Any, **named: Any) -> None: ...
    def swap_contents(self, *arguments: Any, **named: Any) -> None: ...


class DrawSums(Protocol):
    """The functions of `draws.reference`."""

    def add_draws(
        self, sums: Tensor, keys: Tensor, worth: Tensor, lowest: int, *, take_back: bool = False
    ) -> None: ...
    def estimate_log(self, sums: Tensor, keys: Tensor, lowest: int) -> Tensor: ...


def choose_id_map(device: torch.device) -> IdMapVersion:
    """The functions on the map of a dynamic table on this device."""
    return triton if runs_triton(device) else reference


def choose_draws(device: torch.device) -> DrawSums:
    """The functions on sums of draws on this device."""
    return triton_draws if runs_triton(device) else draws
