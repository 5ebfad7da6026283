"""An export with random weights: the shape of a model without its training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import save_file

from freescale.config import RunConfig
from freescale.config.data import DataConfig
from freescale.config.model import ModelConfig
from freescale.data.catalogue import Catalogue
from freescale.train.build import build_module
from freescale.train.export_folder import EXPORT


def write_export(folder: Path, items: int, max_length: int, width: int, layers: int) -> Path:
    """Writes an export of HSTU with integer items and times in seconds."""
    config = RunConfig(DataConfig(data="none", max_length=max_length))
    model = replace(ModelConfig(), width=width, layers=layers, heads=2)
    config = replace(config, model=model)
    module: Any = build_module(config, items, 0)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {f"{name}.weight" for name in ("item", "action")}
    dense = {name: value for name, value in module.state_dict().items() if name not in tables}
    save_file(
        {name: value.contiguous() for name, value in dense.items()}, folder / "dense.safetensors"
    )
    rows = torch.randn(items, width, generator=torch.Generator().manual_seed(0))
    save_file({"weight": rows * width**-0.5}, folder / "table.item.safetensors")
    events = np.arange(items, 0, -1)
    Catalogue(pa.array(np.arange(items)), events).write(folder)
    (folder / "config.json").write_text(config.to_json())
    (folder / EXPORT).write_text(json.dumps({"version": 1, "time_unit": "s", "step": 0}))
    return folder
