"""Quality of a default run on real data: HR@10 over the full catalogue against the popularity
baseline, 2 ranks.

    .venv/bin/python benchmarks/bench_quality.py --data online_retail_ii.parquet

The asked figure speaks of Online Retail II (UCI Machine Learning Repository; Chen, 2012; CC BY 4.0)
as interactions: returns and unidentified customers left out, 791,044 purchases.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from freescale.bench.common.results import claim, write


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    digest = hashlib.sha256(options.data.read_bytes()).hexdigest()
    freescale = [sys.executable, "-m", "freescale"]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        begin = time.perf_counter()
        command = [
            *freescale,
            "train",
            "--data",
            str(options.data),
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
        f".venv/bin/python benchmarks/bench_quality.py --data {options.data.name}",
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
        dataset={"name": options.data.name, "sha256": digest},
        training={
            "settings": "defaults, 2 ranks",
            "seconds": round(seconds),
            "steps": ledger["steps"],
        },
    )


if __name__ == "__main__":
    main()
