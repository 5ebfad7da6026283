"""Finds a partitioner by name, or a user's own by `module:function`."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import torch

from freescale.balance.partitioners.fixed import FixedOnDevice, fixed
from freescale.balance.partitioners.greedy import greedy, greedy_equal
from freescale.balance.partitioners.karmarkar_karp import karmarkar_karp
from freescale.balance.partitioners.local import local
from freescale.balance.partitioners.variable import Variable, variable
from freescale.balance.problem import Partitioner, Problem


def stay(problem: Problem) -> np.ndarray:
    """`none`: every sample stays on its rank. Returns home [n]."""
    return problem.home


PARTITIONERS: dict[str, Partitioner] = {
    "none": stay,
    "fixed": fixed,
    "variable": variable,
    "greedy": greedy,
    "greedy_equal": greedy_equal,
    "local": local,
    "karmarkar_karp": karmarkar_karp,
}


def find_partitioner(name: str, device: torch.device | str = "cpu") -> Partitioner:
    """Finds a partitioner by a name of `PARTITIONERS` or `module:function`.

    `variable` has its own tuner, which learns only from problems with measured times. `fixed` sorts
    on `device` if that is a GPU. Raises ValueError if there is no such partitioner or it cannot be
    called.
    """
    if name == "fixed" and torch.device(device).type == "cuda":
        return FixedOnDevice(torch.device(device))
    if name == "variable":
        return Variable()
    if name in PARTITIONERS:
        return PARTITIONERS[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(
            f"unknown partitioner {name!r}; there is {', '.join(PARTITIONERS)}, or "
            "module:function of your own"
        )
    try:
        found: Partitioner = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"partitioner {name!r} cannot be found: {error}") from error
    if not callable(found):
        raise ValueError(f"partitioner {name!r} is not a function")
    return found
