"""Locks on files and folders. The kernel releases them with their process, however that ends."""

from __future__ import annotations

import errno
import fcntl

# What file systems without locks answer; EBADF: NFS locks files, but no folders.
_UNSUPPORTED = {
    errno.EBADF,
    errno.EINVAL,
    errno.ENOLCK,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
}


def lock(descriptor: int, wait: bool = True, shared: bool = False) -> bool:
    """Locks an open file or folder until it is closed. Several processes may hold a `shared` lock.

    Returns False on file systems without locks. Raises BlockingIOError if another process holds the
    lock and `wait` is False.
    """
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(descriptor, kind | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True
