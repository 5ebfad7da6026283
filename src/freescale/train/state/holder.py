"""The snapshot holder: a process that holds memory files for the ranks of a run on its machine.
The files outlive the ranks.

It is started by its path and imports nothing but the standard library. It listens on an abstract
Unix socket, which exists in one network namespace and ends with the process. A message is plain
JSON, a memory file comes with it as a descriptor:

    {"do": "put", "name": NAME} + file     {"do": "get", "name": NAME}   answer + file
    {"do": "list"}                         {"do": "drop", "names": [NAME, ...]}
    {"do": "end"}

The files are anonymous (memfd): no folder has them, and when the holder ends, however it does,
their memory is free. It ends on a message, or once nobody has been connected for `patience`
seconds.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time

LARGEST = 1 << 17  # bytes of a message


def read_peer(connection: socket.socket) -> tuple[int, bool]:
    """(process of the other end, whether it is this user's): abstract sockets lack permissions."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    process, user, _ = struct.unpack("3i", found)
    return process, user == os.getuid()


class SnapshotHolder:
    def __init__(self, listener: socket.socket, patience: float) -> None:
        self._listener, self._patience = listener, patience
        self._files: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._connected = 0
        self._last = time.monotonic()  # when somebody was connected

    def run(self) -> None:
        """Serves until a message ends it, or nobody has been connected for `patience` seconds."""
        while True:
            left = self._last + self._patience - time.monotonic()
            if not self._connected and left <= 0:
                return
            for key, _ in self._selector.select(None if self._connected else max(0.01, left)):
                if key.fileobj is self._listener:
                    self._accept()
                elif not self._serve(key.fileobj):  # type: ignore[arg-type]
                    return

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if not read_peer(connection)[1]:
            connection.close()
            return
        connection.setblocking(False)  # a rank that is stopped must not hold up the others
        self._selector.register(connection, selectors.EVENT_READ)
        self._connected += 1

    def _serve(self, connection: socket.socket) -> bool:
        """Answers a message. Returns whether to continue."""
        files: list[int] = []
        ends = False
        try:
            message, files, _, _ = socket.recv_fds(connection, LARGEST, 1)
            if not message:
                raise ConnectionError
            request = json.loads(message)
            ends = request["do"] == "end"
            answer, sent = self._do(request, files)
            socket.send_fds(connection, [json.dumps(answer).encode()], sent)
        except (OSError, ValueError, KeyError, TypeError):
            for file in files:
                if file not in self._files.values():
                    os.close(file)
            self._selector.unregister(connection)
            connection.close()
            self._connected -= 1
            self._last = time.monotonic()
        return not ends

    def _do(
        self, request: dict[str, object], files: list[int]
    ) -> tuple[dict[str, object], list[int]]:
        what, name = request["do"], str(request.get("name"))
        if what == "put":
            self._drop([name])
            self._files[name] = files[0]
        elif what == "drop":
            self._drop([str(each) for each in request["names"]])  # type: ignore[attr-defined]
        elif what == "list":
            return {"names": list(self._files)}, []
        elif what == "get":
            return {}, [self._files[name]] if name in self._files else []
        elif what == "end":  # before the answer: its receiver no longer finds the holder
            self._listener.close()
        else:
            raise ValueError(what)
        return {}, []

    def _drop(self, names: list[str]) -> None:
        for name in names:
            if name in self._files:
                os.close(self._files.pop(name))


def main(name: str, patience: float) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return  # another holder listens
    listener.listen(256)
    # Ctrl-C and the end of a terminal end the ranks, but not the holder.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.write(1, b"listening\n")
        os.close(1)
    SnapshotHolder(listener, patience).run()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
