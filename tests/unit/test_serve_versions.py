"""Versions of a model that a server follows: which of them are closed, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("starlette")
from freescale.config import ServeConfig
from freescale.recommend.serve.app import Server
from freescale.recommend.serve.versions import Version


@pytest.fixture
def versions():
    """Three versions, and the numbers of those that are closed."""
    closed, reader = [], SimpleNamespace(describe_events=dict, cache=None)
    return [Version(reader, None, lambda n=n: closed.append(n)) for n in range(3)], closed


def test_the_last_version_is_in_service(versions):
    (first, second, _), closed = versions
    server = Server(first, ServeConfig())
    with server._use_version() as used:
        server.swap(second)
        assert used is first and closed == []
    assert closed == [0]
    with server._use_version() as used:
        assert used is second
    server.close()
    assert closed == [0, 1]


def test_a_version_that_comes_after_the_end_is_closed(versions):
    """Its process would wait for requests, and whoever started it for the process."""
    (first, second, third), closed = versions
    server = Server(first, ServeConfig())
    server.swap(second)
    server.close()
    server.swap(third)
    assert closed == [0, 1, 2]
