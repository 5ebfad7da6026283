"""The package generative_recommenders of meta-recsys, loaded from its folder.

It needs a newer TorchRec than CPUs have, for one function. A plain function with the same values
replaces it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def open_public(folder: Path) -> None:
    """Makes the package of `folder` importable."""
    if not (folder / "generative_recommenders").is_dir():
        raise ValueError(f"{folder} has no folder generative_recommenders: name a clone of it")
    stand_in = ModuleType("torchrec.modules.sorted_index_select")
    stand_in.maybe_sorted_index_select = (  # type: ignore[attr-defined]
        lambda values, index, _: values.index_select(0, index)
    )
    sys.modules.setdefault(stand_in.__name__, stand_in)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
