"""Ranks that have no engine: a run that does not need it does not compile it, one that does falls
back to process groups on all ranks, with one line. Former names of transports work."""

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


def _connect(name):
    """(what an AllToAll brings, the transport's `about`, what is printed)"""
    printed = io.StringIO()
    with redirect_stderr(printed):
        made = connect("cpu", transport=name)
        ranks = torch.full((made.world,), made.rank)
        got = made.all_to_all(ranks, [1] * made.world, [1] * made.world, "ids").wait()
    about = made.about
    made.close()
    return got.tolist(), about, printed.getvalue()


def _connect_without(transport, name, folder, lacking):
    """The only compiler of `lacking` ranks makes nothing that can be loaded."""
    if transport.rank in lacking:
        os.environ |= {"CC": f"{folder}/cc", "XDG_CACHE_HOME": f"{folder}/cache"}
        tempfile.tempdir = folder
    return _connect(name)


def make_compiler(folder):
    bad = folder / "cc"
    bad.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ntouch "${0%cc}called"\nseq 1000 > "$2"\n'
    )
    bad.chmod(0o755)


@pytest.mark.parametrize("lacking", [[0, 1, 2], [1]])
@pytest.mark.parametrize("name", ["collective", "auto", "hostwire-tcp", "hostwire-gloo"])
def test_all_ranks_fall_back_if_one_has_no_engine(name, lacking, tmp_path):
    make_compiler(tmp_path)
    first, *others = run_ranks(3, _connect_without, name, str(tmp_path), lacking)
    for got, about, _ in (first, *others):
        assert got == [0, 1, 2]
        assert about.startswith("transport collective (")
    # process groups need no engine: nothing is compiled
    assert Path(tmp_path, "called").exists() == (name != "collective")
    assert [text for *_, text in others] == ["", ""]
    lines = first[2].splitlines()
    if name == "hostwire-gloo":
        assert "hostwire-gloo is now hostwire-tcp" in lines.pop(0)
    if name == "collective":
        assert lines == []
        return
    (line,) = lines
    ranks = "ranks 0, 1, 2" if len(lacking) == 3 else "rank 1"
    assert f"engine in C is missing on {ranks} (" in line and "invalid ELF header" in line
    assert line.endswith("all ranks use process groups (--transport collective)")


def _connect_as_it_is(transport, name):
    return _connect(name)


def test_the_name_of_a_removed_transport_is_replaced_with_a_message():
    (got, about, line), (_, other_about, other_line) = run_ranks(
        2, _connect_as_it_is, "hostwire-gloo"
    )
    assert got == [0, 1] and about == other_about == "transport hostwire-tcp (as requested)"
    assert line == "freescale: transport hostwire-gloo is now hostwire-tcp: replace the name\n"
    assert other_line == ""
