"""Comparisons: which configuration pays, with how many rounds, and where lines cross."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from diptych.bench import plots, tables
from diptych.bench.compare import Cell, compare, crossings, enough_rounds, order, too_few
from diptych.bench.conclusion import conclusion
from diptych.bench.load import Record
from diptych.bench.selftest import stub
from diptych.bench.serve import Bench, Load, Workload
from diptych.bench.service import Target
from diptych.bench.stats import fewest_rounds, holm, least_p
from diptych.contract.errors import ConfigInvalid

NOISE = (0.0, 0.01, -0.01, 0.02, 0.0, 0.01, 0.02, -0.01)


def cell(rate: float, *middles: float, share: float = 0.9, workload: str = "100x10") -> Cell:
    """A side a middle, each with some noise of its own around it."""
    made = Cell(workload, Load(rate=rate), share)
    for at in range(len(NOISE)):
        sides = [middle + NOISE[(at + 3 * side) % len(NOISE)] for side, middle in enumerate(middles)]
        made.add([{"ttft_ms": {"p50": value}, "output_tokens_s": 10.0} for value in sides])
    return made


def test_two_in_words() -> None:
    cells = [cell(1.0, 5.0, 6.0), cell(2.0, 5.0, 4.0), cell(3.0, 5.0, 5.0)]
    said = conclusion(cells, ("apart", "together"))
    assert "1 requests/s: apart pays against together in ttft_ms p50." in said[0]
    assert "together pays against apart" in said[1]
    assert "neither pays" in said[2]
    assert said[3].startswith("100x10, by load: the lines of ttft_ms p50 of apart and together cross at 1.")
    found = crossings([(each.load.level, each) for each in cells], ("apart", "together"), (0, 1))
    assert found == {"ttft_ms p50": [pytest.approx(1.5, abs=0.02)]}
    # Lines that are alike cross by chance, and that is not said.
    cells = [cell(1.0, 5.0, 5.001), cell(2.0, 5.001, 5.0), cell(3.0, 5.0, 5.0)]
    assert not any("cross" in sentence for sentence in conclusion(cells, ("apart", "together")))


def test_three_in_words() -> None:
    names = ("apart", "together 64", "together 128")
    said = conclusion([cell(1.0, 5.0, 3.0, 3.0)], names)
    where = "100x10 (90% of the tokens are prompt), 1 requests/s"
    assert said == [
        f"{where}: together 64 pays against apart in ttft_ms p50.",
        f"{where}: together 128 pays against apart in ttft_ms p50.",
        f"{where}: nothing between together 64 and together 128; no difference is beyond chance (p > 0.05).",
        f"{where}: apart pays against none of the others.",
    ]


def test_lines_cross_by_the_share_of_prompt_tokens() -> None:
    cells = [
        cell(2.0, 5.0, 4.0, share=0.5, workload="64x64"), cell(2.0, 5.0, 6.0, share=0.9, workload="576x64"),
    ]  # fmt: skip
    said = conclusion(cells, ("apart", "together"))
    assert said[-1].startswith("2 requests/s, by the prompt's share of the tokens: the lines of ttft_ms p50 of apart")
    assert said[-1].split(" cross at ")[1].startswith("0.7")


def test_each_p_is_corrected_for_the_others() -> None:
    """The example of Holm's paper's procedure: the smallest times all, the next times one fewer, never falling."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5]) == [0.5]
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    (row,) = [cell(1.0, 5.0, 3.0, 3.0).verdicts("abc")["ttft_ms p50"]]
    assert [pair["p"] for pair in row["pairs"][:2]] == [round(2 / 2**8, 4)] * 2
    assert row["pairs"][0]["p_holm"] == pytest.approx(3 * 2 / 2**8, abs=1e-4)
    assert row["sides"]["a"]["median"] == pytest.approx(5.0, abs=0.02)


def test_how_many_rounds_are_enough() -> None:
    assert [enough_rounds(sides) for sides in (2, 3, 4, 6)] == [6, 7, 8, 10]
    assert fewest_rounds(1) == 6
    assert least_p(6) == 2 / 64
    assert too_few(2, 6) == ""
    assert "5 rounds can show no difference between 2 configurations" in too_few(2, 5)
    assert "with 6 pairs p is 0.19 at best, above 0.05. 8 rounds can." in too_few(4, 6)


def test_every_side_comes_first_and_last_equally_often() -> None:
    for sides in (2, 3, 4):
        orders = [order(turn, sides) for turn in range(2 * sides)]
        assert all(sorted(each) == list(range(sides)) for each in orders)
        for place in (0, -1):
            assert sorted(each[place] for each in orders) == sorted([*range(sides)] * 2)


def test_a_round_in_which_a_side_answered_nothing_is_left_out() -> None:
    made = cell(1.0, 5.0, 6.0)
    made.add([{"errors": {"X": 1}}, {"ttft_ms": {"p50": 1.0}, "output_tokens_s": 1.0}])
    (pair,) = made.verdicts("ab")["ttft_ms p50"]["pairs"]
    assert (pair["rounds"], pair["better"]) == (8, "a")


def test_configurations_are_swept() -> None:
    made = Target.swept("together:=roles=colocated,colocated.token_budget=64|128", "m")
    assert [target.name for target in made] == ["together 64", "together 128"]
    assert made[1].arguments == ("--model", "m", "--set=roles=colocated", "--set=colocated.token_budget=128")
    assert [target.name for target in Target.swept("prefill.count=1|2,decode.count=1|2", "m")][1] == (
        "prefill.count=1,decode.count=2"
    )
    assert Target.swept("127.0.0.1:5", None) == [Target("127.0.0.1:5", "127.0.0.1:5")]
    with pytest.raises(ConfigInvalid, match="'b' is neither"):
        Target.swept("a=1,b", "m")


async def test_every_side_sees_the_same_prompts_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that comes again would be found in the prefix cache."""
    seen: dict[str, list[tuple[int, ...]]] = {"a": [], "b": []}

    async def run(self: Bench, load: Load, label: str = "") -> list[Record]:
        chats, _ = self.workload.chats(self.vocab, self.context, self.runs)
        seen[self.address] += [chat.turns[0].tokens[:8] for chat in chats]
        return [Record(0.0, 0.0, 8, 4, [(1.0, 2), (2.0, 2)])]

    monkeypatch.setattr(Bench, "run", run)
    stop, loads = asyncio.Event(), [Load(rate=1.0), Load(rate=2.0)]
    for lengths in ("8x4", "16x4"):
        sides = [Bench(name, 1000, 64, Workload(lengths=lengths, count=5), stop) for name in "ab"]
        cells = await compare(sides, "ab", loads, 3, None, lambda row: None)
        assert [len(cell.rounds) for cell in cells] == [3, 3]
    assert sorted(seen["a"]) == sorted(seen["b"])
    assert len(set(seen["a"])) == len(seen["a"]) == 2 * 2 * 3 * 5


def test_a_comparison_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = [cell(1.0, 5.0, 6.0, 7.0), cell(2.0, 5.0, 4.0, 3.0)]
    rows = [
        {"workload": each.workload, "level": each.load.level, "verdicts": each.verdicts("abc")} for each in cells
    ]  # fmt: skip
    plots.can_draw()
    tables.draw(tmp_path, "bench-compare", {"cells": rows, "configurations": list("abc")})
    assert {path.name for path in tmp_path.iterdir()} == {"bench-compare.png", "bench-compare.svg"}
    assert (tmp_path / "bench-compare.svg").read_text().count("<!-- ttft") >= 1


@pytest.mark.slow
async def test_a_chunk_budget_is_swept_against_disaggregation(shallow_model: Path, tmp_path: Path) -> None:
    """Real services, started for the comparison and stopped after it."""
    arguments = [
        "--model", str(shallow_model), "--compare", "apart:=roles=disaggregated",
        "together:=roles=colocated,colocated.max_batch=8,colocated.token_budget=16|64", "--lengths", "48x4",
        "--requests", "4", "--rate", "5", "--rounds", "2", "--objective", "ttft=30s", "--out", str(tmp_path),
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "diptych.cli", "bench", "serve", *arguments, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 110.0)
    assert process.returncode == 0, err
    line = json.loads(out.splitlines()[-1])
    assert line["configurations"] == ["apart", "together 16", "together 64"]
    assert all((row["answered"], row["met"]) == (4, 1.0) for row in line["rounds"])
    assert len(line["rounds"]) == 6


@pytest.fixture
async def addresses() -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(stub(2)) for _ in range(3)]


async def test_the_command_with_three(addresses: list[str]) -> None:
    sides = [f"{name}:={address}" for name, address in zip("abc", addresses, strict=True)]
    arguments = ["--compare", *sides, "--lengths", "8x4", "--requests", "5", "--rate", "200", "--rounds", "2"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "diptych.cli", "bench", "serve", *arguments, stdout=PIPE, stderr=PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60.0)
    assert process.returncode == 0, err
    assert b"2 rounds can show no difference between 3 configurations" in err
    line: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert line["configurations"] == ["a", "b", "c"]
    assert [row["configuration"] for row in line["rounds"]] == ["a", "b", "c", "c", "b", "a"]
    (only,) = line["cells"]
    assert len(only["verdicts"]["ttft_ms p50"]["pairs"]) == 3
    assert set(only["verdicts"]["e2e_ms p50"]["sides"]) == {"a", "b", "c"}
    assert "2 rounds can show no difference" in line["conclusion"][0]
