"""The public port, held for one service.

Routers of one service share a port (SO_REUSEPORT), and the kernel would let a second service share it too, without a
word: each would get a part of the calls. So the launcher binds it once without sharing, and holds a lock on it while
the service lives, also in the moments when no router listens.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path

from diptych.contract.errors import ConfigInvalid


class PortLease:
    """`take` it before routers start, `release` it after they stopped; a process that dies releases it too."""

    def __init__(self, port: int, file: int) -> None:
        self.port = port
        self._file = file

    @classmethod
    def take(cls, host: str, port: int) -> PortLease:
        """port 0 picks a free one. Raises `ConfigInvalid` naming the port when somebody listens on it or has it."""
        found = _bind(host, port)
        path = Path(tempfile.gettempdir()) / f"diptych-port-{found}.lock"
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigInvalid(f"Port {found} cannot be locked with {path}: {error.strerror}.") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise ConfigInvalid(f"Port {found} belongs to another Diptych service; choose another port.") from None
        return cls(found, file)

    def release(self) -> None:
        """The lock's file stays: removing it would let two services lock two files of one name."""
        os.close(self._file)


def _bind(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a port that only waits out old connections is free
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise ConfigInvalid(f"Port {port} on {host} {why}; choose another with --port.") from None
        bound: int = probe.getsockname()[1]
        return bound
