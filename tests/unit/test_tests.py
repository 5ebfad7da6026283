"""Test files stand alone: what several of them need is in tests/helpers."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
# Code in a string: a program that a test starts in another process.
IN_A_STRING = re.compile(r"\b(?:from|import)\s+(?:\w+\.)*(test_\w+)")


def find_imported_tests(source: str) -> list[str]:
    """Names of the test modules that `source` imports, also within functions and strings."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            if not modules[0].startswith("freescale"):
                modules += [alias.name for alias in node.names]  # from . import test_x
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            modules = IN_A_STRING.findall(node.value)
        else:
            continue
        found += [module for module in modules if module.split(".")[-1].startswith("test_")]
    return found


def test_no_test_file_is_imported():
    files = sorted(TESTS.rglob("*.py"))
    assert Path(__file__).resolve() in files and len({file.parent for file in files}) > 4
    imported = {
        str(file.relative_to(TESTS)): found
        for file in files
        if file != Path(__file__).resolve()
        and (found := find_imported_tests(file.read_text(encoding="utf-8")))
    }
    assert imported == {}


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("import test_x", id="import"),
        pytest.param("import json, unit.test_x as x", id="import from a folder"),
        pytest.param("from test_x import build", id="from"),
        pytest.param("from . import test_x", id="from a package"),
        pytest.param("def f():\n    from test_x import build", id="in a function"),
        pytest.param("S = 'import sys; import test_x as t'", id="in a string"),
        pytest.param("S = f'{a}; from test_x import {b}'", id="in a formatted string"),
    ],
)
def test_an_import_of_a_test_file_is_found(source):
    assert find_imported_tests(source)


def test_other_imports_are_none_of_a_test_file():
    source = "import pytest\nfrom helpers.toys import clicks_batch\nS = 'from helpers import toys'"
    assert find_imported_tests(source) == []


def test_names_of_test_files_are_unique():
    """pytest imports test files by their bare name."""
    names = [file.name for file in TESTS.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
