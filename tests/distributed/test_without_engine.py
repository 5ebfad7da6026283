"""Ranks that have no engine: who does not need it does not ask for it, who does carries in Python
and says so."""

from __future__ import annotations

import io
import os
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from helpers.ranks import run_ranks

from freescale.transport.connect import connect


def _connected(transport, name, folder):
    """What carries over a transport of that name where the only compiler makes nothing that can be
    loaded; and what was said."""
    os.environ |= {"CC": f"{folder}/cc", "XDG_CACHE_HOME": f"{folder}/cache"}
    tempfile.tempdir = folder
    said = io.StringIO()
    with redirect_stderr(said):
        made = connect("cpu", transport=name)
        world = made.world
        got = made.all_to_all(
            torch.full((world,), made.rank), [1] * world, [1] * world, "ids"
        ).wait()
    asked = Path(folder, "asked").exists()
    carrier = type(getattr(made, "_channel", None)).__name__
    if made is not transport:
        made.close()
    return got.tolist(), carrier, asked, said.getvalue()


@pytest.mark.parametrize("name", ["collective", "auto", "hostwire-gloo"])
def test_where_the_engine_cannot_be_loaded(name, tmp_path):
    bad = tmp_path / "cc"
    bad.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ntouch "${0%cc}asked"\nseq 1000 > "$2"\n'
    )
    bad.chmod(0o755)
    first, second = run_ranks(2, _connected, name, str(tmp_path))
    for got, carrier, asked, _ in (first, second):
        assert got == [0, 1]
        assert carrier == ("PythonChannel" if name == "hostwire-gloo" else "NoneType")
        assert asked == (name != "collective")  # auto takes shared memory only with the engine
    assert second[3] == ""
    if name == "hostwire-gloo":
        (line,) = first[3].splitlines()
        assert "Python carries for ranks 0, 1" in line and "invalid ELF header" in line
    else:
        assert first[3] == ""
