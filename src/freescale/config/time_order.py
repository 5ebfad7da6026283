"""Parses settings of samples in order of time: the length of a window, actions by number."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from freescale.config.options import split_names

DEFAULT_WINDOW = "1d"
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_IN_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


@dataclass(frozen=True)
class Duration:
    """A length of time as a person writes it."""

    number: int
    unit: str | None  # None: the unit of the data
    flag: str = "--window"

    def convert(self, unit: str | None) -> int:
        """The length in the unit of the data, one of s, ms, us, ns; None: not known."""
        if self.unit is None:
            return self.number
        if unit is None:
            raise ValueError(
                f"{self.flag} {self.number}{self.unit}: the times of the data are of no known "
                "unit; give a number in their unit"
            )
        return self.number * _SECONDS[self.unit] * _IN_SECOND[unit]


def parse_duration(text: str, flag: str = "--window", least: int = 1) -> Duration:
    """Parses `12h`, `7d` or a number in the unit of the data. ValueError if it is neither, or below
    `least`."""
    found = re.fullmatch(r"\s*(\d+)\s*(s|min|h|d|w)?\s*", text)
    if found is None or int(found[1]) < least:
        raise ValueError(
            f"{flag} must be a length of time as 30min, 12h, 7d, or a number of at least {least} "
            f"in the unit of the data, not {text!r}"
        )
    return Duration(int(found[1]), found[2], flag)


def parse_actions(flag: str, text: str) -> tuple[int, ...]:
    """Parses `1,4`. ValueError if one is no number, or there twice."""
    names = split_names(text)
    if not all(re.fullmatch(r"\d+", name) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"{flag} must be different numbers of actions, as 1,4, not {text!r}")
    return tuple(map(int, names))


def refuse_split(split: str) -> NoReturn:
    raise ValueError(
        f"--split {split} with --order time: the last window is held out, and every window before "
        "it is trained; leave --split out"
    )
