"""The job files of docs/guide/scale.md: shown as they are, read by their tools, and run with
stand-ins for what a cluster has."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SBATCH, MANIFEST = (
    ROOT / "examples" / "slurm" / "train.sbatch",
    ROOT / "examples" / "kubernetes" / "train.yaml",
)
PAGE = (ROOT / "docs" / "guide" / "scale.md").read_text(encoding="utf-8")


def command_of(manifest: Path) -> list[str]:
    """What the container runs, with its variables as the pod's environment has them."""
    _, job = yaml.safe_load_all(manifest.read_text(encoding="utf-8"))
    container = job["spec"]["template"]["spec"]["containers"][0]
    words = [*container["command"], *container["args"]]
    return [re.sub(r"\$\((\w+)\)", lambda found: os.environ[found[1]], word) for word in words]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """srun runs its command here, scontrol names two nodes, torchrun says how it was called."""
    stands_in = {
        "scontrol": "printf 'node7\\nnode8\\n'",
        "srun": '[ "$1" = --kill-on-bad-exit=1 ] && shift; exec "$@"',
        "torchrun": 'printf \'%s\\n\' own-store "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$@"',
    }
    for name, body in stands_in.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    told = {
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_JOB_ID": "12345",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "1",
    }
    told |= {"NODES": "2", "RANKS": "8", "JOB_COMPLETION_INDEX": "0"}
    told |= {
        "DATA": "/shared/my histories.parquet",
        "RUN": str(tmp_path / "a run"),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "a run"


def started(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_a_job_starts_and_resumes_by_one_command(kind, cluster):
    slurm = kind == "slurm"
    words = started(*(["bash", str(SBATCH)] if slurm else command_of(MANIFEST)))
    at = dict(zip(words, words[1:], strict=False))
    assert (at["--nnodes"], at["--nproc-per-node"]) == ("2", "8")
    if slurm:
        assert at["--max-restarts"] == "3" and at["--rdzv-backend"] == "c10d"
        assert at["own-store"] == "1"  # a torchrun that is started again can join
        assert at["--rdzv-endpoint"] == f"node7:{20000 + 12345}" and at["--rdzv-id"] == "12345"
    else:  # the Job starts containers again
        assert (at["--max-restarts"], at["--node-rank"]) == ("0", "0")
        assert at["--master-addr"] == "train-0.freescale"
    assert at["-m"] == "freescale" and at["freescale"] == "train" and at["--resume"] == "auto"
    assert at["--data"] == "/shared/my histories.parquet" and at["--folder"] == str(cluster)


def test_options_of_the_job_go_to_training(cluster):
    assert started("bash", str(SBATCH), "--epochs", "3")[-2:] == ["--epochs", "3"]


def test_options_exist(cluster):
    from freescale.cli.main import main

    known = {
        option
        for parameter in main.commands["train"].params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    for words in (started("bash", str(SBATCH)), command_of(MANIFEST)):
        ours = words[words.index("train") :]
        given = {word for word in ours if word.startswith("--")}
        assert len(given) >= 6 and given <= known


def test_the_manifest_is_one():
    service, job = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["selector"] == {
        "job-name": job["metadata"]["name"]
    }
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    container = pod["containers"][0]
    told = {entry["name"]: entry["value"] for entry in container["env"]}
    assert (
        int(told["NODES"]) == job["spec"]["completions"]
        and int(told["RANKS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    )
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }


def test_the_page_shows_them_and_names_what_is_read():
    for path in (SBATCH, MANIFEST):
        assert path.read_text(encoding="utf-8") in PAGE, (
            f"docs/guide/scale.md does not show {path.name} as it is"
        )
    row = next(line for line in PAGE.splitlines() if "what FreeScale reads to join" in line)
    named = set(re.findall(r"`([A-Z_]+)`", row.split("|")[1]))
    package = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "src" / "freescale").rglob("*.py")
    )
    joined = re.findall(
        r'"([A-Z_]+)": ',
        (ROOT / "src" / "freescale" / "launch" / "ranks.py").read_text(encoding="utf-8"),
    )
    # what our own launcher tells its ranks
    assert named == set(joined) - {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"}
    assert all(re.search(rf"environ(\.get\(|\[)?[^\n]*[\"']{name}[\"']", package) for name in named)
