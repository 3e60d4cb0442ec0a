"""The public port, held for one service.

Routers of one service share a port (SO_REUSEPORT), and the kernel would let a second service share it too, without a
word: each would get a part of the calls. So the launcher binds it once without sharing, and holds a lock on it while
the service lives, also in the moments when no router listens. It also keeps a socket bound that listens to nobody:
otherwise a free port may be gone, to any outgoing connection, by the time that a router asks for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path

from diptych.contract.errors import ConfigInvalid


class PortLease:
    """`take` it before routers start, `release` it after they stopped; a process that dies releases it too."""

    def __init__(self, port: int, file: int, path: Path, held: socket.socket) -> None:
        self.port = port
        self._file, self._path = file, path
        self._held = held

    @classmethod
    def take(cls, host: str, port: int) -> PortLease:
        """port 0 picks a free one. Raises `ConfigInvalid` naming the port when somebody listens on it or has it."""
        found = _bind(host, port)
        # A name for each user: one user's file could not be opened by the next. Between users the bind above decides.
        path = Path(tempfile.gettempdir()) / f"diptych-port-{found}-{os.getuid()}.lock"
        try:
            file = _locked(path)
        except BlockingIOError:
            raise ConfigInvalid(f"Port {found} belongs to another Diptych service; choose another port.") from None
        except OSError as error:
            raise ConfigInvalid(f"Port {found} cannot be locked with {path}: {error.strerror}.") from None
        held = _socket(host)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, found))
        return cls(found, file, path, held)

    def release(self) -> None:
        """May be repeated. The lock's file goes while it is still locked: see `_locked`."""
        self._held.close()
        if self._file >= 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._file)
        self._file = -1


def _locked(path: Path) -> int:
    """The file at `path`, made and locked. Raises `BlockingIOError` when another process has it. One that was removed
    between opening and locking is nobody's lock, and the next of its name is tried: so no two hold one name."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(file)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _socket(host: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that only waits out old connections is free
    return made


def _bind(host: str, port: int) -> int:
    with _socket(host) as probe:
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise ConfigInvalid(f"Port {port} on {host} {why}; choose another with --port.") from None
        bound: int = probe.getsockname()[1]
        return bound
