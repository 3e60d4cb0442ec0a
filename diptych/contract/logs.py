"""How every process of ours logs: warnings and worse, one form, to standard error."""

from __future__ import annotations

import logging

FORM = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def log_to_stderr() -> None:
    """Once, when a process starts; a host that has set up its own logging keeps it."""
    logging.basicConfig(level=logging.WARNING, format=FORM)
