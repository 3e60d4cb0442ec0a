"""Which GPU a group that only says `cuda` uses: without an answer here every group of a machine would share the first.

Owns counting GPUs without torch (a front must not load it) and the choice of an index. A device with an index of its
own (`cuda:1`) is the operator's word and stays.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from diptych.cluster.config import Group
from diptych.contract.errors import ConfigInvalid
from diptych.workers.parallel.layout import may_share_a_gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"
ASK_LIMIT = 10.0  # seconds for the driver to list its GPUs


def lent_device(device: str, lent: Sequence[int | str]) -> str:
    """`cuda` becomes the first GPU that Ray lent this process, which sees all of the node's: by its index among those.

    lent: ids as Ray tells them, in the numbering of the node's own CUDA_VISIBLE_DEVICES where it has one. Raises
    `ConfigInvalid` when there are several and they do not stand side by side, as the ranks of a group take them."""
    if device != "cuda" or not lent:
        return device
    seen = _visible() or []
    found = sorted(seen.index(str(gpu)) if str(gpu) in seen else int(gpu) for gpu in lent)
    if found != list(range(found[0], found[0] + len(found))):
        numbers = ", ".join(map(str, found))
        raise ConfigInvalid(f"Ray lent the GPUs {numbers}, but a group's ranks take GPUs that stand side by side.")
    return f"cuda:{found[0]}"


def spread(groups: Sequence[Group], gpus: int | None = None) -> list[Group]:
    """Groups of this machine take turns on its GPUs; as they are where none is found. gpus: how many, if known."""
    if not any(group.settings.device == "cuda" for group in groups):
        return list(groups)
    found, turn, placed = count() if gpus is None else gpus, 0, []
    for group in groups:
        if group.settings.device == "cuda" and found:
            width = group.settings.grid.ranks
            if width > found and not may_share_a_gpu():
                raise ConfigInvalid(
                    f"{group.name} of {group.settings.grid.text} needs {width} GPUs, and this machine has {found}."
                )
            turn = turn if turn + width <= found else 0  # its GPUs stand side by side
            placed.append(_on(group, f"cuda:{turn}"))
            turn += width
        else:
            placed.append(group)
    return placed


def count() -> int:
    """GPUs that a process started here would see; 0 if there are none, or none can be told."""
    seen = _visible()
    if seen is not None:
        return len(seen)
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=ASK_LIMIT, check=True)
    except (OSError, subprocess.SubprocessError):  # no such tool: the device files tell
        return len([node for node in Path("/dev").glob("nvidia*") if node.name.removeprefix("nvidia").isdigit()])
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _visible() -> list[str] | None:
    named = os.environ.get(VISIBLE)
    return None if named is None else [name.strip() for name in named.split(",") if name.strip()]


def _on(group: Group, device: str) -> Group:
    return msgspec.structs.replace(group, settings=msgspec.structs.replace(group.settings, device=device))
