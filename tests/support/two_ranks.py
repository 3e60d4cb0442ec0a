"""What must hold for two ranks whatever their device: the same bodies on CPUs over gloo and on GPUs over NCCL."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diptych.contract.registry import Table
from diptych.contract.request import Key, Request, Sampling, Stopping
from diptych.contract.wire import WorkerInfo
from diptych.kernels.all_reduce import all_reduce_reference
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import load
from diptych.workers.parallel.group import Group
from diptych.workers.settings import WorkerSettings
from diptych.workers.worker import Worker
from tests.support.engine import GREEDY, Harness
from tests.support.families import Tiny, make_tiny
from tests.support.following import following
from tests.support.lent import lend_some
from tests.support.paged import Driver
from tests.support.probe import Probe, hand_over
from tests.support.ranks import decoder_of, device_of, run_ranks

DENSE, MIXTURE = "llama2", "qwen3_moe, normalised"
Case = tuple[str, bool]
CASES: list[Case] = [(DENSE, False), (MIXTURE, False), (MIXTURE, True)]
"""(family, experts spread): dense layers, experts sliced, experts spread."""
VOCAB, SECRET = 512, b"a secret of these tests alone"
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # greedy margins are wide
}
_SEEDED = Sampling(temperature=0.9, seed=7, top_k=40, top_p=0.95)
_PENALISED = Sampling(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3)
_COUNT = 12


def make(family: str, folder: Path) -> Tiny:
    """A model that every kernel takes."""
    more = {"moe_intermediate_size": 64} if family == MIXTURE else {}
    return make_tiny(family, folder, _SIZES | more)


def prompts() -> list[tuple[int, ...]]:
    draw = random.Random(3)
    return [tuple(draw.randrange(1, VOCAB) for _ in range(length)) for length in (150, 5, 64, 37, 1, 90)]


# ── sums in one launch ────────────────────────────────────────────────────────────────────────────────────────────────

_SHAPES = [(1, 1), (6, 256), (3, 700), (1, 7), (1, 256), (17, 4096), (32, 2048)]


def _sums(group: Group, shared: Path, dtypes: list[torch.dtype]) -> int:
    """Against the parts gathered and added up here, bit for bit; on a GPU also in a graph, replayed over new parts."""
    lend_some(group, shared)
    shapes = _SHAPES if group.device.type == "cuda" else _SHAPES[:4]
    sizes = [(shape, dtype) for dtype in dtypes for shape in shapes]
    parts = [torch.empty(shape, dtype=dtype, device=group.device) for shape, dtype in sizes]
    rests = [torch.randn_like(part) for part in parts]
    outs = [torch.empty_like(part) for part in parts]

    def draw(turn: int) -> list[Tensor]:
        torch.manual_seed(100 * turn + group.rank)
        for part in parts:
            part.normal_()
        return [
            all_reduce_reference(list(group.gather(part)), residual=rest)
            for part, rest in zip(parts, rests, strict=True)
        ]

    def add_up() -> None:
        for part, rest, out in zip(parts, rests, outs, strict=True):
            out.copy_(part)
            group.sum(out, residual=rest)

    def check(right: list[Tensor]) -> None:
        for out, expected, size in zip(outs, right, sizes, strict=True):
            assert torch.equal(out, expected), size

    for turn in range(3):
        right = draw(turn)
        add_up()
        check(right)
    if group.device.type == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            add_up()
        for turn in range(3, 20):
            right = draw(turn)
            graph.replay()
            check(right)
            if turn % 5 == 0:  # and between replays as they come
                add_up()
                check(right)
        graph.reset()
    group.check()
    assert group.peers is not None
    return int(group.peers.calls[0])


def check_sums(device: str, shared: Path, dtypes: list[torch.dtype]) -> None:
    first, second = run_ranks(2, _sums, shared, dtypes, limit=100.0 if device == "cpu" else 280.0, device=device)
    assert first == second


# ── the model ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _logits(
    group: Group, cases: list[tuple[Path, bool]], shared: Path | None, count: int
) -> list[tuple[Tensor, list[list[int]]]]:
    """Of each case: the first prompt's logits in chunks, and greedy tokens of all prompts together."""
    if shared is not None:
        lend_some(group, shared)
    found = []
    for folder, spread in cases:
        decoder = decoder_of(group, folder, spread)
        logits = Driver(decoder, scattered=True).logits(prompts()[0], chunk=40).cpu()
        found.append((logits, Driver(decoder).greedy(prompts(), count)))
    return found


def check_logits(
    tinies: dict[str, Tiny], device: str, shared: Path | None, cases: Sequence[Case] = CASES, count: int = _COUNT
) -> None:
    """Both ranks' logits are the same bits, their error is at most 4 times that of transformers in float32, and the
    greedy tokens are one rank's on the same device. shared: an empty folder to lend memory by, or sums as usual."""
    ranks = run_ranks(
        2,
        _logits,
        [(tinies[name].folder, spread) for name, spread in cases],
        shared,
        count,
        limit=100.0 if device == "cpu" else 280.0,
        device=device,
    )
    ids = torch.tensor([prompts()[0]])
    for index, (name, spread) in enumerate(cases):
        tiny, (logits, greedy) = tinies[name], ranks[0][index]
        assert torch.equal(logits, ranks[1][index][0]), (name, spread)
        with torch.inference_mode():
            exact, theirs = tiny.exact(ids).logits[0], tiny.theirs(ids).logits[0]
        allowed = 4 * (theirs.double() - exact).abs().max() + torch.finfo(torch.float32).eps * exact.abs().max()
        assert (logits.double() - exact).abs().max() <= allowed, (name, spread)
        config = ModelConfig.from_folder(tiny.folder)
        alone = Decoder(config, load(tiny.folder, config, torch.float32, device_of(device, 0)))
        assert greedy == ranks[1][index][1] == Driver(alone).greedy(prompts(), count), (name, spread)


# ── the engine ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _tokens(harness: Harness) -> dict[str, list[int]]:
    for number, prompt in enumerate(prompts()):
        for kind, sampling in (("greedy", GREEDY), ("seeded", _SEEDED), ("penalised", _PENALISED)):
            harness.ask(f"{kind}-{number}", prompt, 6 + 5 * number, sampling)
    harness.run()
    return dict(harness.loop.tokens)


def check_engine(folder: Path, device: str, spread: bool, lent: bool) -> None:
    """All requests at once, prompts in chunks between others' tokens, sampled and penalised: one rank's tokens. Decode
    steps are captured with their collectives where the device has graphs and the experts are not spread."""
    given: dict[str, Any] = {"device": device, "dtype": "float32", "cache_blocks": 160, "overlap": 1}
    alone = _tokens(Harness(folder, threads=1, **given))
    with following(folder, lent, tensor=2, spread_experts=spread, **given) as harness:
        runner: Any = harness.engine.runner
        assert (runner.decoder.embedding.group.peers is not None) == (device == "cuda" and lent)
        assert bool(runner.runner._graphs) == (device == "cuda" and not spread)
        assert _tokens(harness) == alone


# ── the hand-over ─────────────────────────────────────────────────────────────────────────────────────────────────────


class _Registry:
    """The table of two workers in one process."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerInfo] = {}

    async def renew(self, info: WorkerInfo) -> None:
        self._workers[info.id] = info

    async def remove(self, worker_id: str) -> None:
        self._workers.pop(worker_id, None)

    async def table(self) -> Table:
        return Table(0, tuple(self._workers.values()))


@asynccontextmanager
async def _linked(*groups: WorkerSettings) -> AsyncIterator[tuple[Probe, Probe]]:
    """Sessions with a prefill and a decode worker, once all their links are ready."""
    registry = _Registry()
    async with AsyncExitStack() as stack:
        found = []
        for settings in groups:
            worker = Worker(settings, SECRET, registry)
            stack.push_async_callback(worker.stop, drain=False)
            found.append(await stack.enter_async_context(Probe(await worker.start(), SECRET)))
        prefill, decode = found
        await prefill.until(lambda load: decode.info.id in load.links)
        await decode.until(lambda load: prefill.info.id in load.links)
        yield prefill, decode


async def _hand_over(folder: Path, devices: tuple[str, str], sizes: tuple[int, int]) -> list[list[int]]:
    given: dict[str, Any] = {"model": str(folder), "dtype": "float32", "cache_blocks": 160, "threads": 1}
    given |= {"max_batch": 8, "token_budget": 64, "check_integrity": True, "message_bytes": 1 << 16, "overlap": 1}
    prefill = WorkerSettings(role="prefill", device=devices[0], tensor=sizes[0], **given)
    decode = WorkerSettings(role="decode", device=devices[1], tensor=sizes[1], **given)
    async with _linked(prefill, decode) as (near, far):
        asked = [
            Request(Key(f"r{number}"), prompt, Stopping(_COUNT, ignore_eos=True), GREEDY)
            for number, prompt in enumerate(prompts())
            if len(prompt) > 16  # a shorter one is prefilled by decode itself
        ]
        found = await asyncio.gather(*(hand_over(near, far, request) for request in asked))
        await near.until_free()
        await far.until_free()
        return [outcome.tokens for outcome in found]


def check_hand_over(tiny: Tiny, devices: tuple[str, str], sizes: tuple[int, int]) -> None:
    """KV computed by `sizes[0]` ranks and continued by `sizes[1]`, re-sliced by heads on its way in several messages:
    one rank's tokens."""
    config = ModelConfig.from_folder(tiny.folder)
    alone = Decoder(config, load(tiny.folder, config, torch.float32, device_of(devices[1].split(":")[0], 0)))
    long = [prompt for prompt in prompts() if len(prompt) > 16]
    right = [Driver(alone).greedy([prompt], _COUNT)[0] for prompt in long]
    assert asyncio.run(_hand_over(tiny.folder, devices, sizes)) == right
