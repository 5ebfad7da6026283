"""Quality of a default run on real data: HR@10 over the full catalogue against the popularity
baseline, 2 ranks.

The asked figure speaks of Online Retail II (UCI Machine Learning Repository; Chen, 2012; CC BY 4.0)
as interactions: returns and unidentified customers left out, 791,044 purchases.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from freescale.bench.common.results import Destination, claim, write


def bench_quality(data: Path, to: Destination) -> None:
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    freescale = [sys.executable, "-m", "freescale"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        begin = time.perf_counter()
        command = [
            *freescale,
            "train",
            "--data",
            str(data),
            "--nproc",
            "2",
            "--folder",
            str(run),
            "--cache",
            folder,
        ]
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - begin
        subprocess.run([*freescale, "eval", str(run), "--nproc", "2"], check=True)
        quality = json.loads((run / "eval-test.json").read_text())["quality"]
        ledger = json.loads((run / "ledger.json").read_text())
    rows = [{"arm": name, **metrics} for name, metrics in quality.items()]
    ratio = quality["model"]["hr@10"] / quality["popularity"]["hr@10"]
    write(
        "quality",
        "cpu",
        f"freescale bench quality --data {data.name}",
        rows,
        [
            claim(
                "HR@10 over the full catalogue, times that of the popularity baseline",
                1.5,
                ratio,
                "x",
                at_least=True,
            )
        ],
        dataset={"name": data.name, "sha256": digest},
        to=to,
        training={
            "settings": "defaults, 2 ranks",
            "seconds": round(seconds),
            "steps": ledger["steps"],
        },
    )
