"""`diptych tune` and `diptych calibrate`: what is found once for a GPU or a model, and stored beside it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diptych.contract.errors import ConfigInvalid

if TYPE_CHECKING:  # the command line's help needs neither
    import torch

    from diptych.kernels.tune_chain import LayerShape, Shape
    from diptych.workers.model.config import ModelConfig

FEW_INSIDE = 0.99
"""A share of rows inside the unified maximum's window below which it does not pay."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tune = commands.add_parser("tune", help="find the fastest products for a model's shapes on this GPU")
    tune.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="only its config.json is read")
    tune.add_argument("--rows", default="1,2,4,8,16,32,64,128", help="batch sizes (default: %(default)s)")
    tune.add_argument("--tensor", type=int, default=1, help="ranks that share the model (default: %(default)s)")
    tune.add_argument("--seconds", type=float, default=600.0, help="stop sweeping after so long (default: %(default)s)")
    tune.set_defaults(run=_tune)
    calibrate = commands.add_parser(
        "calibrate", help="find a model's window for the unified maximum of decode attention"
    )
    calibrate.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    calibrate.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="one prompt a line")
    calibrate.add_argument("--device", default="cpu")
    calibrate.set_defaults(run=_calibrate)


def _tune(args: argparse.Namespace) -> int:
    import torch

    from diptych.kernels.tune import tune
    from diptych.workers.model.config import ModelConfig
    from diptych.workers.model.loader import dtype_of

    config = ModelConfig.from_folder(args.model)
    if not torch.cuda.is_available():
        raise ConfigInvalid("diptych tune times kernels on a GPU, and PyTorch sees none here.")
    try:
        rows = [int(part) for part in args.rows.split(",")]
    except ValueError:
        rows = []
    if not rows or min(rows) < 1:
        raise ConfigInvalid(f"--rows takes batch sizes such as 1,8,32, not {args.rows!r}.")
    dtype = dtype_of("auto", config, "cuda")
    if dtype is torch.float32:
        raise ConfigInvalid("The model is in float32, whose products the library serves; there is nothing to tune.")
    shapes, layer = rank_shapes(config, args.tensor)
    path = tune(shapes, rows=rows, dtype=dtype, limit_s=args.seconds, layer=layer, say=print)
    print(f"Written to {path}.")
    return 0


def rank_shapes(config: ModelConfig, ranks: int) -> tuple[Sequence[Shape], LayerShape | None]:
    """The products of one of `ranks` that share the model, and its layer where that is dense. Raises `ConfigInvalid`
    where the model cannot be divided so."""
    from diptych.kernels.tune import decoder_shapes
    from diptych.kernels.tune_chain import LayerShape
    from diptych.workers.parallel.layout import Grid, ModelSizes, kv_share, padded_share, refuse_bad_layout

    if ranks < 1:
        raise ConfigInvalid(f"--tensor takes a number of ranks, not {ranks}.")
    moe = config.moe
    sizes = ModelSizes(config.heads, config.kv_heads, config.width, moe.experts if moe else 0, moe.width if moe else 0)
    refuse_bad_layout(sizes, Grid(1, ranks), False, "A group")
    heads, kv_heads = config.heads // ranks, len(kv_share(config.kv_heads, 0, ranks))
    width = None if moe else config.width // ranks
    vocab = len(padded_share(config.vocab, 0, ranks))
    shapes = decoder_shapes(config.hidden, heads, kv_heads, config.head_dim, width, vocab)
    return shapes, LayerShape(config.hidden, heads, kv_heads, config.head_dim, width) if width else None


def _calibrate(args: argparse.Namespace) -> int:
    from diptych.router.tokenizer import Tokenizer
    from diptych.workers.model.calibration import calibrate, save
    from diptych.workers.model.config import ModelConfig
    from diptych.workers.model.decoder import Decoder
    from diptych.workers.model.loader import dtype_of, load

    config, device = ModelConfig.from_folder(args.model), _device(args.device)
    lines = _prompt_lines(args.prompts)
    tokenizer = Tokenizer.load(args.model)
    prompts = {number: tokenizer.encode(line) for number, line in lines.items()}
    _check_prompts(args.prompts, prompts, config)
    # A CPU computes in float32; what is served is the model's own dtype, whose window may be narrower.
    decoder = Decoder(config, load(args.model, config, dtype_of("auto", config, device), device))
    found = calibrate(decoder, prompts.values(), served=dtype_of("auto", config, "cuda"))
    path = save(found, args.model)
    low, high = found.scores
    print(f"phi {found.phi:.2f}, window +-{found.high:.0f}: {found.rows_inside:.4%} of the rows are inside.")
    print(f"Scores from {low:.1f} to {high:.1f}. Written to {path}.")
    if found.rows_inside < FEW_INSIDE:
        print(
            f"diptych: Warning: only {found.rows_inside:.2%} of the rows are inside the window, and decode attention"
            " computes all others twice: leave engine.softmax at running for this model.",
            file=sys.stderr,
        )
    return 0


def _device(name: str) -> torch.device:
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigInvalid(f"--device takes cpu, cuda or cuda:N, not {name!r}.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigInvalid(f"--device takes cpu, cuda or cuda:N, not {name!r}.")
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise ConfigInvalid(f"--device {name}: the GPUs that PyTorch sees here are {torch.cuda.device_count()}.")
        torch.cuda.set_device(device.index or 0)  # where kernels are launched
    return device


def _prompt_lines(file: Path) -> dict[int, str]:
    """The lines that hold something, by number from 1."""
    if not file.is_file():
        raise ConfigInvalid(f"The prompts file {file} does not exist.")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigInvalid(f"{file} is not text in UTF-8.") from None
    except OSError as error:
        raise ConfigInvalid(f"{file} cannot be read: {error}.") from None
    lines = {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    if not lines:
        raise ConfigInvalid(f"{file} holds no prompt.")
    return lines


def _check_prompts(file: Path, prompts: Mapping[int, Sequence[int]], config: ModelConfig) -> None:
    for number, ids in prompts.items():
        if not ids:
            raise ConfigInvalid(f"{file}:{number}: this prompt has no token.")
        if len(ids) > config.max_positions:
            raise ConfigInvalid(
                f"{file}:{number}: this prompt has {len(ids)} tokens, and the model accepts {config.max_positions}."
            )
        if max(ids) >= config.vocab:
            raise ConfigInvalid(
                f"{file}:{number}: this prompt holds token {max(ids)}, and the model's vocabulary ends at"
                f" {config.vocab - 1}."
            )
