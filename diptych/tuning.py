"""`diptych tune` and `diptych calibrate`: what is found once for a GPU or a model, and stored beside it."""

from __future__ import annotations

import argparse
from pathlib import Path

from diptych.contract.errors import ConfigInvalid


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tune = commands.add_parser("tune", help="find the fastest products for a model's shapes on this GPU")
    tune.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="only its config.json is read")
    tune.add_argument("--rows", default="1,2,4,8,16,32,64,128", help="batch sizes (default: %(default)s)")
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

    from diptych.kernels.tune import decoder_shapes, tune
    from diptych.kernels.tune_chain import LayerShape
    from diptych.workers.model.config import ModelConfig

    config = ModelConfig.from_folder(args.model)
    if not torch.cuda.is_available():
        raise ConfigInvalid("diptych tune times kernels on a GPU, and PyTorch sees none here.")
    try:
        rows = [int(part) for part in args.rows.split(",")]
    except ValueError as error:
        raise ConfigInvalid(f"--rows takes batch sizes such as 1,8,32, not {args.rows!r}.") from error
    width = None if config.moe is not None else config.width
    shapes = decoder_shapes(config.hidden, config.heads, config.kv_heads, config.head_dim, width, config.vocab)
    layer = width and LayerShape(config.hidden, config.heads, config.kv_heads, config.head_dim, width)
    path = tune(shapes, rows=rows, limit_s=args.seconds, layer=layer or None, say=print)
    print(f"Written to {path}.")
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    import torch
    from transformers import AutoTokenizer

    from diptych.workers.model.calibration import calibrate, save
    from diptych.workers.model.config import ModelConfig
    from diptych.workers.model.decoder import Decoder
    from diptych.workers.model.loader import load

    config = ModelConfig.from_folder(args.model)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigInvalid(f"--device {args.device}: PyTorch sees no GPU here.")
    if not args.prompts.is_file():
        raise ConfigInvalid(f"The prompts file {args.prompts} does not exist.")
    try:
        lines = [line for line in args.prompts.read_text().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ConfigInvalid(f"{args.prompts} is not text in UTF-8.") from error
    if not lines:
        raise ConfigInvalid(f"{args.prompts} holds no prompt.")
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    decoder = Decoder(config, load(args.model, config, dtype, args.device))
    found = calibrate(decoder, [tokenizer(line)["input_ids"] for line in lines])
    path = save(found, args.model)
    low, high = found.scores
    print(f"phi {found.phi:.2f}, window +-{found.high:.0f}: {found.rows_inside:.4%} of the rows are inside.")
    print(f"Scores from {low:.1f} to {high:.1f}. Written to {path}.")
    return 0
