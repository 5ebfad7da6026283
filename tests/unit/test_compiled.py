"""The compiled engine: where it is kept, what happens where it cannot be, and its warnings."""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from freescale import compiled, folders
from freescale.transport.hostwire.bindings import SOURCE, ErrorCode


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The user's cache and the folder for temporary files, both empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "cache" / "freescale"


def load(path):
    """Without a trace: a library that stays loaded is not loaded again, whatever became of its
    file."""
    handle = ctypes.CDLL(path)._handle
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(handle))
    return path


def test_it_is_compiled_once_and_kept(kept, monkeypatch):
    first, why = compiled.compile_and_load(SOURCE, load)
    assert first is not None and not why
    (made,) = kept.iterdir()
    monkeypatch.setattr(compiled, "_compile", None)  # nothing is compiled the second time
    assert compiled.compile_and_load(SOURCE, load) == (str(made), "")


def test_a_change_of_any_source_is_another_library(tmp_path):
    before = compiled._hash_sources(SOURCE.parent, compiled.FLAGS)
    copied = Path(shutil.copytree(SOURCE.parent, tmp_path / "csrc"))
    seen = [compiled._hash_sources(copied, compiled.FLAGS)]
    assert seen == [before]  # the same text
    included = re.findall(r'#include "(.*)"', (copied / "engine.c").read_text())
    for name in ("engine.c", *included):
        with (copied / name).open("a") as file:
            file.write("/* another */\n")
        seen.append(compiled._hash_sources(copied, compiled.FLAGS))
    assert len(seen) > 5 and len(set(seen)) == len(seen)


def test_error_codes_are_those_of_the_header():
    text = SOURCE.with_name("engine.h").read_text()
    (body,) = re.findall(r"typedef enum \{(.*?)\} ErrorCode;", text, re.DOTALL)
    found = {name: int(value) for name, value in re.findall(r"ERROR_(\w+) = (\d+)", body)}
    assert found == {code.name: code.value for code in ErrorCode}


@pytest.mark.parametrize("damage", ["cut off", "another"])
def test_a_damaged_one_is_made_again(kept, damage):
    compiled.compile_and_load(SOURCE, load)
    (made,) = kept.iterdir()
    whole = made.read_bytes()
    made.write_bytes({"cut off": whole[:9000], "another": whole[:-1] + b"?"}[damage])
    assert compiled.compile_and_load(SOURCE, load)[0] is not None
    assert [file.read_bytes() for file in kept.iterdir()] == [whole]


def test_one_that_this_machine_cannot_load_is_made_again(kept):
    compiled.compile_and_load(SOURCE, load)
    (made,) = kept.iterdir()
    whole, refused = made.read_bytes(), []

    def picky(path):
        if path == str(made) and not refused:
            refused.append(path)
            raise OSError("version `GLIBC_2.99' not found")
        return load(path)

    assert compiled.compile_and_load(SOURCE, picky)[0] is not None and refused
    assert [file.read_bytes() for file in kept.iterdir()] == [whole]


def test_what_cannot_be_loaded_is_not_kept_and_the_reason_is_told(kept, tmp_path, monkeypatch):
    bad = tmp_path / "cc"
    bad.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nseq 1000 > "$2"\n')
    bad.chmod(0o755)
    monkeypatch.setenv("CC", str(bad))
    made, why = compiled.compile_and_load(SOURCE, load)
    assert made is None and "invalid ELF header" in why and "\n" not in why
    assert list(kept.iterdir()) == []


def test_a_cache_that_nothing_is_executed_from(kept, tmp_path):
    kept.mkdir(parents=True)
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "none", str(kept)]).returncode
    ):
        pytest.skip("nothing can be mounted here")
    try:
        made, _ = compiled.compile_and_load(SOURCE, load)
        assert made is not None and (tmp_path / "temporary") in Path(made).parents, made
        assert list(kept.iterdir()) == []
    finally:
        subprocess.run(["umount", str(kept)], check=True)


def test_without_a_home_the_cache_is_beside_temporary_files(tmp_path, monkeypatch):
    def unknown(user):
        raise KeyError(f"uid not found: {user}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = folders.find_cache_folder()
    assert (
        folder == tmp_path / f"freescale-{os.getuid()}" and folder.stat().st_mode & 0o777 == 0o700
    )
    made, why = compiled.compile_and_load(SOURCE, load)
    assert made is not None and not why
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="others may write to it.*--cache"):
        folders.find_cache_folder()
    made, why = compiled.compile_and_load(SOURCE, load)
    assert made is None and "others may write to it" in why


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_another_user_is_not_taken(kept, tmp_path):
    kept.mkdir(parents=True)
    os.chown(kept, 65534, 65534)
    assert folders.find_cache_folder() == tmp_path / "temporary" / f"freescale-{os.getuid()}"


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_the_engine_compiles_without_a_warning(name, tmp_path):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}")
    strict = [
        found,
        *compiled.FLAGS,
        "-Wall",
        "-Wextra",
        "-Wconversion",
        "-Wmissing-prototypes",
        "-Werror",
        "-o",
        str(tmp_path / "engine.so"),
        str(SOURCE),
    ]
    done = subprocess.run(strict, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
