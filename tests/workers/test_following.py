"""Several ranks in lock step, the first engine in this process: whatever its policies do, the tokens stay the same."""

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


def _follow(sock: socket.socket, settings: WorkerSettings, rank: int) -> None:
    torch.set_num_threads(1)
    channel: Any = _Unheard()
    follower, _ = build_follower(Launch(settings, b"s", "0", "test", rank), channel, Line(sock))
    follower.run()


@contextmanager
def _ranks(model: Path, **settings: Any) -> Iterator[Harness]:
    given = {"cache_blocks": 128, "threads": 1, "max_batch": 8, "token_budget": 64} | settings
    launched = WorkerSettings(model=str(model), role="colocated", **given)
    lines, members = [], []
    for rank in range(1, launched.grid.ranks):
        ours, theirs = socket.socketpair()
        member = _context.Process(target=_follow, args=(theirs, launched, rank), daemon=True)
        member.start()
        theirs.close()
        lines.append(Line(ours))
        members.append(member)
    try:
        yield Harness(model, lines, **given)
        for line in lines:
            line.sock.shutdown(socket.SHUT_RDWR)  # a thread of ours reads it: closing alone would tell nobody
        for member in members:
            member.join(20.0)
            assert member.exitcode == 0
    finally:
        for member in members:
            member.kill()
            member.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny("llama2", folder, _SIZES)
    return folder


def _alone(model: Path) -> dict[str, list[int]]:
    harness = Harness(model, threads=1)
    for name, prompt, tokens, sampling in REQUESTS:
        harness.ask(name, prompt, tokens, sampling)
    harness.run()
    return harness.loop.tokens


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, list[int]]:
    return _alone(model)


@pytest.mark.parametrize("overlap", [0, 1])
def test_preemption_overlap_and_penalties_give_one_ranks_tokens(
    model: Path, alone: dict[str, list[int]], overlap: int
) -> None:
    """14 blocks do not hold them all: block tables shrink, move and grow again, and every rank must know."""
    with _ranks(model, tensor=2, overlap=overlap, cache_blocks=14, prefix_cache=False) as harness:
        for name, prompt, tokens, sampling in REQUESTS:
            harness.ask(name, prompt, tokens, sampling, prompt_logprobs=1 if name == "one" else None)
        harness.run()
        assert harness.loop.tokens == alone
        stages = [stage.name for ended in harness.loop.ended.values() for stage in ended.stages]
        assert "decode.preempted" in stages


@pytest.mark.parametrize("grid", [{"tensor": 2}, {"data": 2}], ids=str)
def test_cancels_and_cached_prefixes(model: Path, alone: dict[str, list[int]], grid: dict[str, int]) -> None:
    """What a data rank holds of a prompt is found again there, and an idle step follows a busy one."""
    with _ranks(model, **grid, overlap=1) as harness:
        for number in range(2):
            for name, prompt, tokens, sampling in REQUESTS:
                harness.ask(f"{name}/{number}", prompt, tokens, sampling)
            for _ in range(5):
                harness.engine.turn()
            harness.say(Cancel(next(iter(harness.engine.sequences))))
            harness.run()
        ended = harness.loop.ended
        assert ended["chunked/1"].cached == 144
        for name, tokens in harness.loop.tokens.items():
            whole = alone[name.split("/")[0]]
            assert tokens == whole if ended[name].reason == "length" else tokens == whole[: len(tokens)]


@pytest.mark.parametrize("overlap", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_two_data_ranks_share_the_requests(model: Path, alone: dict[str, list[int]], overlap: int) -> None:
    """Small pools: sequences are preempted in either, come back in the other, and must take nothing of theirs along."""
    with _ranks(model, data=2, overlap=overlap, cache_blocks=11, prefix_cache=False) as harness:
        seen: dict[str, set[int]] = {}
        for name, prompt, tokens, sampling in REQUESTS:
            harness.ask(name, prompt, tokens, sampling, prompt_logprobs=1 if name == "one" else None)
        while harness.loop.inbox or harness.engine.sequences:
            harness.engine.turn()
            for seq in harness.engine.sequences.values():
                if seq.blocks:
                    seen.setdefault(seq.key.request, set()).add(seq.data_rank)
        harness.run()
        assert harness.loop.tokens == alone
        assert {frozenset(ranks) for ranks in seen.values()} >= {frozenset({0}), frozenset({1})}
        stages = [stage.name for ended in harness.loop.ended.values() for stage in ended.stages]
        assert "decode.preempted" in stages
        assert len(harness.loop.ended["one"].prompt_logprobs) == 32


@pytest.mark.parametrize(
    ("family", "data", "tensor"),
    [
        ("qwen3_moe, normalised", 2, 1),
        pytest.param("mixtral", 2, 1, marks=pytest.mark.slow),
        pytest.param("mixtral", 2, 2, marks=pytest.mark.slow),
        pytest.param("qwen3_moe, normalised", 2, 2, marks=pytest.mark.slow),
        pytest.param("llama2", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_experts_are_spread_over_data_ranks(tmp_path: Path, family: str, data: int, tensor: int) -> None:
    """All requests at once; then one alone, beside which the other data rank has nothing; loads count every rank's."""
    make_tiny(family, tmp_path, _SIZES)
    alone = _alone(tmp_path)
    with _ranks(tmp_path, data=data, tensor=tensor, spread_experts=family != "llama2", overlap=1) as harness:
        for name, prompt, tokens, sampling in REQUESTS:
            harness.ask(name, prompt, tokens, sampling)
        harness.run()
        assert harness.loop.tokens == alone
        before = harness.engine.runner.decoder.expert_load()
        name, prompt, tokens, sampling = REQUESTS[0]
        harness.ask("lonely", prompt, tokens, sampling, salt="x")
        harness.run()
        assert harness.loop.tokens["lonely"] == alone[name]
        if family != "llama2":
            config = harness.engine.runner.decoder.config
            computed = (len(prompt) + tokens - 1) * config.moe.top_k * config.layers
            # A step launched before the last token was known may have computed one more.
            extra = config.moe.top_k * config.layers
            assert sum(harness.engine.runner.decoder.expert_load()) - sum(before) in (computed, computed + extra)
