"""Several ranks in lock step, the first engine in this process: whatever its policies do, the tokens stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diptych.contract.errors import Internal
from diptych.contract.request import Key, Request, Sampling, Stopping
from diptych.contract.wire import Cancel
from diptych.workers.channel import frame
from diptych.workers.parallel.follow import Follower
from diptych.workers.parallel.group import Group
from diptych.workers.parallel.orders import CommitOrder, Line, Opened, RowOrder, StepOrder
from diptych.workers.runner import Drawn, Launch
from diptych.workers.scheduler import Step
from tests.support.engine import GREEDY, Harness, prompt_of
from tests.support.families import make_tiny
from tests.support.following import following

_SIZES = {"vocab_size": 49152, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
_SIZES["max_position_embeddings"] = 512
_COMMIT = len(frame(CommitOrder(1)))
REQUESTS = [
    ("plain", prompt_of(5, 1), 12, GREEDY),
    ("chunked", prompt_of(150, 2), 9, GREEDY),
    ("seeded", prompt_of(20, 3), 16, Sampling(temperature=0.8, seed=42, top_p=0.9)),
    ("penalised", prompt_of(12, 4), 16, Sampling(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5)),
    ("one", prompt_of(33, 5), 1, GREEDY),
    *((f"more-{n}", prompt_of(30, 10 + n), 24, GREEDY) for n in range(4)),
]


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
    with following(model, tensor=2, overlap=overlap, cache_blocks=14, prefix_cache=False) as harness:
        for name, prompt, tokens, sampling in REQUESTS:
            harness.ask(name, prompt, tokens, sampling, prompt_logprobs=1 if name == "one" else None)
        harness.run()
        assert harness.loop.tokens == alone
        stages = [stage.name for ended in harness.loop.ended.values() for stage in ended.stages]
        assert "decode.preempted" in stages


@pytest.mark.parametrize("grid", [{"tensor": 2}, {"data": 2}], ids=str)
def test_cancels_and_cached_prefixes(model: Path, alone: dict[str, list[int]], grid: dict[str, int]) -> None:
    """What a data rank holds of a prompt is found again there, and an idle step follows a busy one."""
    with following(model, **grid, overlap=1) as harness:
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
    with following(model, data=2, overlap=overlap, cache_blocks=11, prefix_cache=False) as harness:
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
    with following(tmp_path, data=data, tensor=tensor, spread_experts=family != "llama2", overlap=1) as harness:
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
            load = harness.engine.runner.decoder.expert_load()
            assert sum(load) - sum(before) in (computed, computed + extra)
            assert harness.loop.load.experts == load, "what routers are told"


@pytest.mark.parametrize("grid", [{"tensor": 2}, {"data": 2}], ids=str)
def test_a_step_is_one_small_message(
    model: Path, alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, grid: dict[str, int]
) -> None:
    """While four sequences decode, each step is told to the other rank once, in a few bytes a sequence."""
    sizes: list[int] = []
    send = Line.send_frame

    def count(line: Line, data: bytes) -> None:
        sizes.append(len(data))
        send(line, data)

    monkeypatch.setattr(Line, "send_frame", count)
    with following(model, **grid, overlap=1) as harness:
        for name, prompt, tokens, sampling in REQUESTS[-4:]:
            harness.ask(name, prompt, tokens, sampling)
        for _ in range(8):
            harness.engine.turn()
        sizes.clear()
        for _ in range(10):
            harness.engine.turn()
        assert all(seq.generated for seq in harness.engine.sequences.values())
        orders = [size for size in sizes if size > _COMMIT]
        assert len(orders) == 10
        assert max(orders) <= 32 + 4 * 24
        assert len(sizes) <= 20  # between data ranks, also when the first waits for what the other drew
        harness.run()
        assert harness.loop.tokens == {name: alone[name] for name, *_ in REQUESTS[-4:]}


class _Draws:
    """In a runner's place: a 7 for every row."""

    block_size, decoder = 16, Group(None, 0, 2, "cpu")

    def launch(self, step: Step) -> Launch:
        return Launch(step, [Drawn(7, None) for _ in step.rows], {}, 0, 0)


@pytest.mark.parametrize("told", [7, 8])
def test_a_rank_that_drew_another_token_does_not_go_on(told: int) -> None:
    runner: Any = _Draws()
    none: Any = None
    follower = Follower(runner, none, none)
    request = Request(Key("r"), (1, 2, 3), Stopping(4))
    follower.obey(StepOrder(0, 0, 0, (), (Opened(1, request, ()),), (), (RowOrder(1, 0, 3, True, 0, (5,)),)))
    next_step = StepOrder(1, 0, 0, (told,), (), (), (RowOrder(1, 3, 1, True, 1, ()),))
    if told == 7:
        follower.obey(next_step)
    else:
        with pytest.raises(Internal, match=r"drew \[7\], the first \[8\]"):
            follower.obey(next_step)
