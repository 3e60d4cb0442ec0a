"""Every process of ours logs in one form."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

LINE = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING diptych\.x: words$"


@pytest.mark.parametrize(
    ("module", "start"),
    [
        ("diptych.cli", "try:\n    m.main(['--version'])\nexcept SystemExit: pass"),
        ("diptych.workers.engine_process", "sys.argv[1:] = [str(closed())]\nm.main()"),
        ("diptych.cluster.worker_process", "sys.argv[1:] = [str(closed())]\nm.main()"),
    ],
)
def test_a_process_logs_a_time_a_level_and_a_name(module: str, start: str) -> None:
    """Started as it is, and told at once that its other end is gone."""
    script = f"""
import importlib, logging, os, socket, sys

def closed():
    ours, theirs = socket.socketpair()
    theirs.close()
    return ours.detach()

m = importlib.import_module({module!r})
{start}
logging.getLogger("diptych.x").warning("words")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert re.search(LINE, done.stderr, re.MULTILINE), done.stderr
