"""The demo model's first layers: all that it is but what it says, at a third of the time. For tests of what becomes of
a request, whatever its text."""

from __future__ import annotations

import json
from pathlib import Path

LAYERS = 4
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


def make_shallow(model: Path, folder: Path) -> Path:
    """Fills `folder` with the first layers of the model in the folder `model`, and returns it."""
    from safetensors import safe_open  # here: processes that only want to know how many layers load no torch
    from safetensors.torch import save_file

    for file in model.iterdir():
        if file.name not in (_CONFIG, _WEIGHTS):
            (folder / file.name).symlink_to(file)
    config = json.loads((model / _CONFIG).read_text())
    (folder / _CONFIG).write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    deeper = tuple(f"model.layers.{number}." for number in range(LAYERS, config["num_hidden_layers"]))
    with safe_open(model / _WEIGHTS, framework="pt") as whole:
        names = [name for name in whole.keys() if not name.startswith(deeper)]  # noqa: SIM118  # no mapping
        save_file({name: whole.get_tensor(name) for name in names}, folder / _WEIGHTS, metadata={"format": "pt"})
    return folder
