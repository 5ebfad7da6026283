"""Settings of a run, with their defaults, help and limits. Imports nothing heavy: `--help` is made
from here."""

from freescale.config.data import DataConfig, GenerateConfig
from freescale.config.model import ModelConfig
from freescale.config.options import option
from freescale.config.run import RunConfig
from freescale.config.serve import ServeConfig
from freescale.config.simulate import SimulateConfig
from freescale.config.train import TrainConfig, parse_split

__all__ = [
    "DataConfig",
    "GenerateConfig",
    "ModelConfig",
    "RunConfig",
    "ServeConfig",
    "SimulateConfig",
    "TrainConfig",
    "option",
    "parse_split",
]
