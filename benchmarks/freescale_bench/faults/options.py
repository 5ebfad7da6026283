"""Which storms to run, and the name of their result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from faults.setting import HOSTS, LAUNCHED, TORCHRUN, Setting, choose_setting

from freescale_bench.common.ranks import get_gpu_name


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    work: Path
    storms: int  # on one machine
    host_storms: int  # over hosts
    real_starts: int  # faults of runs started by commands
    faults: int
    seed: int
    ranks: str
    timeout: float
    device: str = "cpu"
    jobs: int = 1  # parallel storms on one machine

    def plan(self) -> list[tuple[int, int, Setting]]:
        """Returns (seed, faults, setting) of each storm."""
        places = [1] * self.storms + [HOSTS] * self.host_storms
        storms = [
            (
                seed,
                self.faults,
                choose_setting(seed, self.ranks, hosts, self.timeout, device=self.device),
            )
            for seed, hosts in enumerate(places, self.seed)
        ]
        halves = [(LAUNCHED, (self.real_starts + 1) // 2), (TORCHRUN, self.real_starts // 2)]
        for seed, (start, faults) in enumerate(halves, self.seed + len(places)):
            setting = choose_setting(seed, "2", 1, self.timeout, start)
            storms += [(seed, faults, setting)] * (faults > 0)
        return storms

    @property
    def testbed(self) -> str:
        """The result's testbed. Storms on GPUs, storms only over hosts, and only real starts have
        separate results."""
        if self.device == "cuda":
            return f"{self.ranks}ranks-{get_gpu_name()}"
        return "cpu" if self.storms else "hosts" if self.host_storms else "starts"

    @property
    def command(self) -> str:
        words = f"freescale bench faults --storms {self.storms} --faults {self.faults}"
        words += f" --seed {self.seed} --timeout {self.timeout:g} --ranks {self.ranks}"
        words += f" --jobs {self.jobs}" if self.jobs > 1 else ""
        words += f" --device {self.device}" if self.device != "cpu" else ""
        words += f" --host-storms {self.host_storms}" if self.host_storms else ""
        return words + (f" --real-starts {self.real_starts}" if self.real_starts else "")
