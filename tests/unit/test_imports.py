"""The core imports with torch and numpy alone; help does not wait for torch."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import freescale

ROOT = Path(__file__).resolve().parents[2]

CORE = [
    "freescale.batch",
    "freescale.config",
    "freescale.embedding.parallelize",
    "freescale.models.heads",
    "freescale.ledger.collector",
    "freescale.pipeline.pipeline",
    "freescale.train.state.checkpoints",
    "freescale.train.evaluate",
    "freescale.transport.connect",
]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_core_needs_torch_and_numpy_only():
    python(f"""
import sys
OPTIONAL = "pyarrow rich click typer tensorboard safetensors pandas triton".split()
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(name + " is not part of the core")
sys.meta_path.insert(0, Block())
import freescale
for name in {CORE}:
    __import__(name)
DATA = "data Trainer ConsoleProgress Schema load Recommender Recommendations Subscriber".split()
[getattr(freescale, name) for name in freescale.__all__ if name not in DATA]
""")


def test_help_does_not_import_torch():
    out = python("""
import sys
from freescale.cli.main import main
try:
    main(["train", "--help"], prog_name="freescale")
except SystemExit:
    pass
print("torch" in sys.modules, "pyarrow" in sys.modules)
""")
    assert out.endswith("False False\n") and "--global-batch" in out


@pytest.mark.parametrize("name", freescale.__all__)
def test_a_public_name_is_there_with_a_description(name):
    text = inspect.getdoc(getattr(freescale, name))
    assert text and name in dir(freescale)
    assert not text.startswith(f"{name}("), "that is what a dataclass makes up"


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = freescale.Nothing
    assert (Path(freescale.__file__).parent / "py.typed").exists()
    assert '"py.typed"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_use_the_public_names_alone(path):
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"^\s*(?:from|import) freescale\.\S+", text, re.MULTILINE)
    named = {
        name.strip().split(" as ")[0]
        for line in re.findall(r"^\s*from freescale import (.+)$", text, re.MULTILINE)
        for name in line.partition("#")[0].strip("() ").split(",")
        if name.strip()
    }
    if path.suffix == ".py" or "```python" in text:
        code = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)) or text
        named |= set(re.findall(r"\bfreescale\.([A-Za-z_]+)", code))
    # needs TorchRec, so it is no name that every installation has
    public = {*freescale.__all__, "torchrec"}
    assert named <= public, sorted(named - public)


def imported(path: Path) -> set[str]:
    """Names that a file imports, in functions and as a `KernelModule` too; `from a import b` may
    name a module or something in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "KernelModule":
            names.add(ast.literal_eval(node.args[0]))
    return names


def test_every_kernel_is_on_the_path_of_training_or_recommending():
    """What only a benchmark runs is elsewhere."""
    root = Path(freescale.__file__).parent
    files = {
        ".".join(["freescale", *path.relative_to(root).with_suffix("").parts]): path
        for path in root.rglob("*.py")
    }
    reached, waiting = set(), ["freescale.train.trainer", "freescale.recommend.recommender"]
    waiting += ["freescale.models.incremental.histories"]  # for servers in Python
    while waiting:
        name = waiting.pop()
        if name in files and name not in reached:
            reached.add(name)
            waiting += imported(files[name])
    kernels = {
        name
        for name in files
        if name.startswith("freescale.kernels.") and not name.endswith("__init__")
    }
    assert kernels <= reached, sorted(kernels - reached)


def test_the_benchmarks_have_the_library_s_version():
    text = (ROOT / "benchmarks" / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{freescale.__version__}"' in text


def find_private_names(source: str) -> list[str]:
    """What a file imports of freescale by a name with an underscore, and the attributes with one
    that it reads from other objects than itself."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("freescale"):
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [word for word in words if word.startswith("_")]
        elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "os", "torch.cuda"):
                found.append(f"{owner}.{node.attr}")
    return found


# Of torch's process groups and of generative-recommenders.
OTHERS = {"options._timeout", "model._embedding_collection"}
BENCHMARKS = sorted((ROOT / "benchmarks" / "freescale_bench").rglob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_benchmarks_use_no_private_name(path):
    assert set(find_private_names(path.read_text(encoding="utf-8"))) <= OTHERS


@pytest.mark.parametrize(
    "source",
    ["from freescale.a import _b", "from freescale._a import b", "self.a._b = 0", "a.b._c()"],
)
def test_a_private_name_is_found(source):
    assert find_private_names(source)
