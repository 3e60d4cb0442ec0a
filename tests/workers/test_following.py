"""Two ranks in lock step, the first engine in this process: whatever its policies do, the tokens stay the same."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.contract.request import Sampling
from diptych.contract.wire import Cancel
from diptych.workers.channel import Launch
from diptych.workers.engine_process import build_follower
from diptych.workers.parallel.orders import Line
from diptych.workers.settings import WorkerSettings
from tests.support.engine import GREEDY, Harness, prompt_of
from tests.support.families import make_tiny

_context = multiprocessing.get_context("forkserver")
_SIZES = {"vocab_size": 49152, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
_SIZES["max_position_embeddings"] = 512
REQUESTS = [
    ("plain", prompt_of(5, 1), 12, GREEDY),
    ("chunked", prompt_of(150, 2), 9, GREEDY),
    ("seeded", prompt_of(20, 3), 16, Sampling(temperature=0.8, seed=42, top_p=0.9)),
    ("penalised", prompt_of(12, 4), 16, Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5)),
    ("one", prompt_of(33, 5), 1, GREEDY),
    *((f"more-{n}", prompt_of(30, 10 + n), 24, GREEDY) for n in range(4)),
]


class _Unheard:
    """A follower's channel: nobody listens to its progress here."""

    def send(self, message: object) -> None:
        pass


def _follow(sock: socket.socket, settings: WorkerSettings) -> None:
    torch.set_num_threads(1)
    channel: Any = _Unheard()
    follower, _ = build_follower(Launch(settings, b"s", "0", "test", 1), channel, Line(sock))
    follower.run()


@contextmanager
def _two_ranks(model: Path, **settings: Any) -> Iterator[Harness]:
    ours, theirs = socket.socketpair()
    given = {"cache_blocks": 128, "threads": 1, "max_batch": 8, "token_budget": 64, "tensor": 2} | settings
    launched = WorkerSettings(model=str(model), role="colocated", **given)
    member = _context.Process(target=_follow, args=(theirs, launched), daemon=True)
    member.start()
    theirs.close()
    try:
        yield Harness(model, [Line(ours)], **given)
        ours.shutdown(socket.SHUT_RDWR)  # a thread of ours reads it: closing alone would tell nobody
        member.join(20.0)
        assert member.exitcode == 0
    finally:
        member.kill()
        member.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny("llama2", folder, _SIZES)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, list[int]]:
    harness = Harness(model, threads=1)
    for name, prompt, tokens, sampling in REQUESTS:
        harness.ask(name, prompt, tokens, sampling)
    harness.run()
    return harness.loop.tokens


@pytest.mark.parametrize("overlap", [0, 1])
def test_preemption_overlap_and_penalties_give_one_ranks_tokens(
    model: Path, alone: dict[str, list[int]], overlap: int
) -> None:
    """14 blocks do not hold them all: block tables shrink, move and grow again, and every rank must know."""
    with _two_ranks(model, overlap=overlap, cache_blocks=14, prefix_cache=False) as harness:
        for name, prompt, tokens, sampling in REQUESTS:
            harness.ask(name, prompt, tokens, sampling, prompt_logprobs=1 if name == "one" else None)
        harness.run()
        assert harness.loop.tokens == alone
        stages = [stage.name for ended in harness.loop.ended.values() for stage in ended.stages]
        assert "decode.preempted" in stages


def test_cancels_and_cached_prefixes(model: Path, alone: dict[str, list[int]]) -> None:
    with _two_ranks(model, overlap=1) as harness:
        for number in range(2):
            for name, prompt, tokens, sampling in REQUESTS:
                harness.ask(f"{name}/{number}", prompt, tokens, sampling)
            for _ in range(5):
                harness.engine.turn()
            harness.say(Cancel(harness.engine.sequences[next(iter(harness.engine.sequences))].key))
            harness.run()
        ended = harness.loop.ended
        assert any(ended[f"chunked/{number}"].cached for number in range(2))
        for name, tokens in harness.loop.tokens.items():
            whole = alone[name.split("/")[0]]
            assert tokens == whole if ended[name].reason == "length" else tokens == whole[: len(tokens)]
