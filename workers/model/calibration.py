"""Finds the scale of attention's asynchronous softmax (FlashDecoding++'s unified maximum) from a model's own scores.

    diptych calibrate --model FOLDER --prompts FILE [--device cuda]

The result is stored beside the model as `unified_maximum.json`: phi, the window that a row's largest score must stay
in, the share of rows that do, and a histogram of all scores. Knows nothing of serving; a forward pass over each prompt
is all it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from diptych.contract.errors import ConfigInvalid, ModelUnsupported
from diptych.kernels.batch import Batch
from diptych.kernels.rms_norm import rms_norm_reference
from diptych.kernels.rope_attention import Unified
from diptych.workers.cache import KVCache
from diptych.workers.model.decoder import Decoder
from diptych.workers.settings import UNIFIED_MAXIMUM

PAGE = 16
BINS, REACH = 512, 256.0
# exp(score - phi) must neither overflow nor vanish: in bfloat16 and float32 far from 88, in float16 from 11.
WINDOW = {torch.bfloat16: 60.0, torch.float32: 60.0, torch.float16: 10.0}


class Calibration(msgspec.Struct, frozen=True):
    """phi, low, high: natural units; a row whose largest score is in [phi - low, phi + high] needs no running maximum.

    rows_inside: share of rows that do so. scores: smallest, largest. histogram: counts of all scores in BINS equal bins
    over [-REACH, REACH], the outermost holding what lies beyond.
    """

    phi: float
    low: float
    high: float
    rows_inside: float
    scores: tuple[float, float]
    histogram: tuple[int, ...]


class _Scores:
    """Looks at the scores of each layer's attention on the way: a decoder's `observe`."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.maxima: list[Tensor] = []
        self.counts = torch.zeros(BINS, dtype=torch.int64)
        self.range = (float("inf"), float("-inf"))

    def __call__(self, index: int, qkv: Tensor) -> None:
        decoder, config, tokens = self.decoder, self.decoder.config, qkv.shape[0]
        layer, window = decoder.layers[index], config.windows[index]
        rows = qkv.view(tokens, -1, config.head_dim).float()
        q, k = rows[:, : config.heads], rows[:, config.heads : config.heads + config.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm_reference(q, layer.q_norm.float(), config.eps)
            k = rms_norm_reference(k, layer.k_norm.float(), config.eps)
        q, k = self._turn(q), self._turn(k)
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=rows.device).tril_()
        if window is not None:
            seen = seen.triu_(1 - window)
        group = config.heads // config.kv_heads
        for head in range(config.heads):  # a head at a time: a prompt's scores of all heads may be large
            scores = q[:, head] @ k[:, head // group].t() * decoder.scale
            self.maxima.append(scores.masked_fill(~seen, float("-inf")).amax(-1).cpu())
            values = scores[seen].cpu()
            self.counts += torch.histc(values.clamp(-REACH, REACH), BINS, -REACH, REACH).long()
            self.range = (min(self.range[0], float(values.min())), max(self.range[1], float(values.max())))

    def _turn(self, x: Tensor) -> Tensor:
        rope, tokens = self.decoder.rope, x.shape[0]
        dim = rope.dim
        cos, sin = rope.cos[:tokens].unsqueeze(1), rope.sin[:tokens].unsqueeze(1)
        turned = x[..., :dim] * cos + x[..., :dim].roll(dim // 2, -1) * sin
        return torch.cat((turned, x[..., dim:]), -1)


@torch.inference_mode()
def calibrate(decoder: Decoder, prompts: Iterable[Sequence[int]], served: torch.dtype | None = None) -> Calibration:
    """Runs each prompt once; there must be one, of one to `max_positions` tokens. served: the dtype that attention will
    run in, which sets the window's reach; the decoder's own by default. phi is where the window covers the most rows.

    Raises `ModelUnsupported` for a dtype that has no window."""
    reach, scores = _reach(served or decoder.dtype), _Scores(decoder)
    decoder.observe = scores
    try:
        for prompt in prompts:
            _forward(decoder, prompt)
    finally:
        decoder.observe = None
    phi, inside = fullest_window(torch.cat(scores.maxima), reach)
    return Calibration(phi, reach, reach, inside, scores.range, tuple(scores.counts.tolist()))


def fullest_window(maxima: Tensor, reach: float) -> tuple[float, float]:
    """(phi, share): of all windows [phi - reach, phi + reach] one that holds most of `maxima` [N], and the share that
    it holds. phi is the middle of those."""
    ordered = maxima.double().sort().values
    ends = torch.searchsorted(ordered, ordered + 2 * reach, right=True)
    counts = ends - torch.arange(len(ordered))  # of the window that begins at each of them
    first = int(counts.argmax())
    held = ordered[first : int(ends[first])]
    return float((held[0] + held[-1]) / 2), len(held) / len(ordered)


def _reach(dtype: torch.dtype) -> float:
    if dtype not in WINDOW:
        raise ModelUnsupported(f"A unified maximum has no window in {dtype}; it has in bfloat16, float16 and float32.")
    return WINDOW[dtype]


def _forward(decoder: Decoder, prompt: Sequence[int]) -> None:
    config, tokens = decoder.config, len(prompt)
    blocks = -(-tokens // PAGE)
    cache = KVCache(config.layers, blocks, PAGE, config.kv_heads, config.head_dim, decoder.dtype, decoder.device)
    at = torch.arange(tokens, device=decoder.device)
    lens = torch.tensor([0, tokens], dtype=torch.int32, device=decoder.device)
    table = torch.arange(blocks, dtype=torch.int32, device=decoder.device).unsqueeze(0)
    ids = torch.tensor(list(prompt), device=decoder.device)
    batch = Batch(ids, at, at, lens, lens[1:], table, (tokens,), (tokens,), (tuple(range(blocks)),), tokens, tokens)
    decoder(batch, cache)


def save(calibration: Calibration, folder: str | Path) -> Path:
    """The file written. Raises `ConfigInvalid` where it cannot be."""
    path = Path(folder) / UNIFIED_MAXIMUM
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)))
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be written: {error}.") from None
    return path


def read(folder: str | Path) -> Calibration:
    """What was stored beside the model. Raises `ConfigInvalid` where nothing was, or nothing that can be read."""
    path = Path(folder) / UNIFIED_MAXIMUM
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except FileNotFoundError:
        raise ConfigInvalid(
            f"engine.softmax = unified needs {path}: run `diptych calibrate --model {folder} --prompts FILE` first."
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigInvalid(f"{path} is not what `diptych calibrate` writes: {error}.") from None


def unified_of(folder: str | Path, dtype: torch.dtype, device: str) -> Unified:
    """The maximum that decode attention on `device` takes for granted, with counts of its own."""
    found, reach = read(folder), _reach(dtype)
    counts = torch.zeros(2, dtype=torch.int64, device=device)
    return Unified(found.phi, min(found.low, reach), min(found.high, reach), counts)
