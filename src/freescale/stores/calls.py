"""Calls of object stores through fsspec, repeated with backoff after errors that may pass.

Credentials come from where the store's own library finds them (environment, profiles, roles).
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_TRIES = 8  # attempts in addition to those of the store's library
_FIRST_S, _LONGEST_S = 0.1, 10.0
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, ValueError)
_THREADS = 16  # requests mostly wait

_lock = threading.Lock()
_systems: dict[tuple[int, str], Any] = {}  # by process: connections do not survive a fork
_pools: dict[int, ThreadPoolExecutor] = {}


def connect(protocol: str, path: object) -> Any:
    """The file system of fsspec. ValueError, with the `path`, if there is none or its package is
    missing."""
    key = os.getpid(), protocol
    with _lock:
        if key not in _systems:
            how: dict[str, Any] = {"use_listings_cache": False}
            if protocol == "s3":
                retries = {"mode": "standard", "max_attempts": 4}
                how["config_kwargs"] = {"retries": retries, "connect_timeout": 10}
            try:
                import fsspec

                _systems[key] = fsspec.filesystem(protocol, **how)
            except ImportError as error:
                package = _PACKAGES.get(protocol, "fsspec")
                raise ValueError(f"{path}: {error}: pip install {package}") from error
            except ValueError as error:
                known = "give a path, or a URL that fsspec knows"
                raise ValueError(f"{path}: {error}; {known}") from error
        return _systems[key]


def get_pool() -> ThreadPoolExecutor:
    """Threads of this process that wait for stores."""
    with _lock:
        if os.getpid() not in _pools:
            _pools[os.getpid()] = ThreadPoolExecutor(_THREADS, "freescale-store")
        return _pools[os.getpid()]


def repeat(what: str, call: Callable[[], T]) -> T:
    """Calls until it succeeds, with growing pauses. OSError with `what` if it never does."""
    wait = _FIRST_S
    for left in reversed(range(_TRIES)):
        try:
            return call()
        except PermissionError as error:
            text = f"{what}: {' '.join(str(error).split())[:300]}; check the credentials"
            raise PermissionError(errno.EACCES, text) from None
        except _FINAL:
            raise
        except Exception as error:  # noqa: BLE001 - libraries of stores raise classes of their own
            if is_refused(error) or "credential" in type(error).__name__.lower() or not left:
                text = " ".join(str(error).split())[:300]
                raise OSError(errno.EIO, f"{what}: {text}") from None
        time.sleep(wait * random.uniform(0.5, 1.5))
        wait = min(2 * wait, _LONGEST_S)
    raise AssertionError("the last try returns or raises")


def is_refused(error: Exception) -> bool:
    """Whether a store refused a request for what it is, such as a condition that does not hold."""
    return isinstance(error, OSError) and error.errno == errno.EINVAL
