"""The core imports with torch and numpy alone; help does not wait for torch."""

from __future__ import annotations

import subprocess
import sys

CORE = [
    "freescale.batch",
    "freescale.config",
    "freescale.embedding.swap",
    "freescale.models.heads",
    "freescale.observe.collect",
    "freescale.pipeline.api",
    "freescale.train.checkpoint",
    "freescale.train.evaluate",
    "freescale.transport.connect",
]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_core_needs_torch_and_numpy_only():
    python(f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("pyarrow", "rich", "click", "typer", "tensorboard", "safetensors", "pandas", "triton"):
            raise ImportError(name + " is not part of the core")
sys.meta_path.insert(0, Block())
import freescale
for name in {CORE}:
    __import__(name)
freescale.parallelize, freescale.Pipeline, freescale.SequenceBatch
""")


def test_help_does_not_import_torch():
    out = python("""
import sys
from freescale.cli import main
try:
    main(["train", "--help"], prog_name="freescale")
except SystemExit:
    pass
print("torch" in sys.modules, "pyarrow" in sys.modules)
""")
    assert out.endswith("False False\n") and "--global-batch" in out
