"""Where a run comes from that continues another one on newer data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

KEPT = "origin"  # folder in that of a run: what it needs of the run that it continues


@dataclass(frozen=True)
class Origin:
    """The run that another one continues, and what data and model need to know of it."""

    run: str  # folder of the run
    step: int  # step of the checkpoint that the new run begins with
    checksum: int  # checksum of that checkpoint
    trained_until: int | None  # time of the last event that it was trained on, if known
    since: int | None  # only later events are trained on; None: all
    rows: dict[str, int]  # rows of its tables of items and actions, by table
    # the folder with its vocabulary and statistics of features: the run's own, later a copy in the
    # folder of the new run
    kept: str

    def find_kept(self, folder: Path) -> Origin:
        """The origin of the run in `folder`, with the copy that is kept there."""
        kept = folder / KEPT
        return replace(self, kept=str(kept)) if kept.is_dir() else self

    def describe(self) -> str:
        """One line for the notes of a run."""
        until = "" if self.trained_until is None else f", trained until {self.trained_until}"
        what = "all events" if self.since is None else f"events later than {self.since}"
        return f"continues {self.run} from step {self.step:,}{until}; trains on {what}"
