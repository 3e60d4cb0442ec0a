"""One Ray suite at a time on a machine: each starts a cluster of its own, and two would starve each other."""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def ray_lock(limit: float = 600.0) -> Iterator[None]:
    """Holds the machine's lock; raises TimeoutError if another suite keeps it beyond `limit` seconds."""
    path = Path(tempfile.gettempdir()) / "diptych-ray-tests.lock"
    with path.open("w") as file:
        until = time.monotonic() + limit
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"another Ray suite holds {path}") from None
                time.sleep(0.2)
        yield
