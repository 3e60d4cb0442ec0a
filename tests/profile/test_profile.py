"""The anatomy: what an operator must do, what it took, and that both engines are measured alike."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from diptych.cli import main
from diptych.kernels.ceilings import Ceilings
from diptych.profile import anatomy, measure, softmax, table6
from diptych.profile.borders import border
from diptych.profile.memory import MemoryCurve, tidy, used
from diptych.profile.ours import Ours
from diptych.profile.recorder import BETWEEN, RECORDING, Border, Recorder
from diptych.profile.theirs import Theirs
from diptych.profile.work import Operator, Work, attention, product
from diptych.workers.model.config import ModelConfig
from tests.support.families import make_tiny

CPU = torch.device("cpu")
LIMITS = Ceilings(read=1e9, flops=10e9)


@pytest.fixture(scope="module", params=["llama3", "mixtral", "qwen3_moe, a dense layer"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    make_tiny(request.param, made)
    return made


@pytest.fixture(params=[Ours, Theirs])
def engine(request: pytest.FixtureRequest, folder: Path) -> Any:
    return request.param(folder, ModelConfig.from_folder(folder), torch.float32, CPU, "auto")


def test_the_work_of_a_product_and_of_attention() -> None:
    assert product(2, 3, 5, 4) == Work(60, 4 * (6 + 15 + 10))
    decode = attention(1, 10, 2, heads=4, kv_heads=2, dim=8, item=4, window=None)
    assert decode.flops == 2 * 4 * 4 * 8 * 10
    whole = attention(10, 10, 1, heads=4, kv_heads=2, dim=8, item=4, window=None)
    assert whole.flops == 4 * 4 * 8 * 55
    assert attention(10, 10, 1, 4, 2, 8, 4, window=3).flops == 4 * 4 * 8 * (1 + 2 + 3 * 8)
    for queries, context, window in ((1, 10, 3), (4, 10, 3), (9, 10, 3), (9, 10, 40), (3, 3, 3), (1, 1, 5)):
        pairs = sum(min(p, window) for p in range(context - queries + 1, context + 1))
        assert attention(queries, context, 1, 1, 1, 1, 4, window).flops == 4 * pairs


def test_a_timeline_is_cut_at_the_borders_of_operators() -> None:
    class Ticks:
        on_host = True
        now = 0.0

        def begin(self) -> None:
            pass

        def cost(self, piece: float) -> float:
            return 0.0

        def mark(self) -> float:
            self.now += 1.0
            return self.now

        def seconds(self, marks: list[float]) -> list[float]:
            return [b - a for a, b in pairwise(marks)]

    outer, inner = Operator("outer", "attention"), Operator("inner", "linear")
    recorder = Recorder(Ticks())
    with recorder.inside(outer):
        pass  # not in a step: not recorded
    with recorder.step():
        with recorder.inside(outer, Work(1, 2)):
            with recorder.inside(inner, Work(3, 4)):
                pass
            with recorder.inside(inner, Work(3, 4)):
                pass
    (step,) = recorder.steps
    assert {o.name: t.seconds for o, t in step.items()} == {
        BETWEEN.name: 2, "outer": 3, "inner": 2, RECORDING.name: 6,
    }  # fmt: skip
    assert (step[inner].calls, step[inner].work) == (2, Work(6, 8))


class Device:
    """A clock of a device: its marks are places on a timeline that each replay fills anew."""

    on_host = False
    times: tuple[float, ...] = ()

    def __init__(self) -> None:
        self.marks = 0
        self.border = Border(empty=1.0, around=2.0)

    def begin(self) -> None:
        pass

    def cost(self, piece: float) -> float:
        return self.border.cost(piece)

    def mark(self) -> int:
        self.marks += 1
        return self.marks - 1

    def seconds(self, marks: list[int]) -> list[float]:
        return [self.times[b] - self.times[a] for a, b in pairwise(marks)]


def test_a_captured_step_is_drawn_once_and_timed_at_each_replay() -> None:
    clock, one, two = Device(), Operator("one", "attention"), Operator("two", "linear")
    recorder = Recorder(clock)
    with recorder.drawn():
        for operator in (one, two):
            with recorder.inside(operator):
                pass
    for long in (12.0, 7.0):
        # to one: nothing; one; between: nothing; two; to the end: more than nothing
        clock.times = (0.0, 1.0, 1.0 + long, 2.0 + long, 12.0 + long, 16.0 + long)
        step = recorder.resolve()
        assert {o.name: t.seconds for o, t in step.items()} == {
            BETWEEN.name: 2, "one": long - 2, "two": 8, RECORDING.name: 8,
        }  # fmt: skip
    assert len(recorder.steps) == 2


def test_what_a_border_costs_is_measured_against_the_same_chain_without() -> None:
    """Each link works 5 and a mark takes 1 of it; the chain that is timed is the one that ran."""

    def run(chain: Any) -> list[list[float]]:
        drawn = chain(lambda: None)
        if len(drawn) == 2:
            return [[5.0 * 128]]
        assert len(drawn) == 2 * 128 + 1
        return [[6.5, 1.0] * 128, [7.0, 1.5] * 128]

    assert border(run) == Border(empty=1.0, around=1.5)


def test_a_row_gets_its_wall_and_its_floor() -> None:
    """1 GB/s and 10 GFLOP/s meet at 10 FLOP/byte."""
    rows = [
        {"ms": 4.0, "gflop": 0.02, "megabytes": 1.0}, {"ms": 3.0, "gflop": 0.001, "megabytes": 1.0},
        {"ms": 1.0, "gflop": 0.0, "megabytes": 0.0},
    ]  # fmt: skip
    anatomy.add_walls([{"operators": rows}], LIMITS)
    told = [tuple(row[key] for key in ("intensity", "wall", "floor_ms", "times_floor")) for row in rows]
    assert told == [(20.0, "compute", 2.0, 2.0), (1.0, "memory", 1.0, 3.0), (0.0, "", 0.0, None)]


def test_a_repeated_step_moves_nothing_on(engine: Any) -> None:
    engine.begin(2, 20, 4)
    engine.prefill()
    again = engine.repeated()
    again()
    drawn = engine.last.tolist()
    again()
    assert engine.last.tolist() == drawn
    engine.begin(2, 20, 4)
    engine.prefill()
    engine.decode()
    assert engine.last.tolist() == drawn


def test_labelling_leaves_an_engine_as_it_was(engine: Any) -> None:
    before = set(vars(engine))
    with engine.labelled(Recorder(Device())):
        assert "_draw" in vars(engine)
    assert set(vars(engine)) == before


def test_the_operators_of_both_engines(engine: Any) -> None:
    prefill, decode = anatomy.phases(engine, 2, 20, 3)
    anatomy.add_walls([prefill, decode], LIMITS)
    for phase in (prefill, decode):
        rows = phase["operators"]
        assert sum(row["ms"] for row in rows) == pytest.approx(phase["operators_ms"], abs=0.01)
        assert sum(phase["shares"].values()) == pytest.approx(1, abs=0.01)
        assert phase["shares"]["attention"] > 0
        assert phase["shares"]["linear"] > 0
        assert all(row["wall"] for row in rows if row["gflop"])
    moe = engine.config.moe is not None
    assert all((decode["shares"][f"MoE {part}"] > 0) == moe for part in ("routing", "index", "experts"))


def test_both_engines_do_the_same_products(folder: Path) -> None:
    """FLOPs of the linear operators and of attention agree; names and merging do not."""
    config, found = ModelConfig.from_folder(folder), []
    for kind in (Ours, Theirs):
        engine: Any = kind(folder, config, torch.float32, CPU, "auto")
        for phase in anatomy.phases(engine, 1, 20, 2):
            rows = phase["operators"]
            # A decode step's attention grows with its context, and which step is the fastest is chance.
            for part in ("linear", "MoE experts", *(["attention"] if phase["phase"] == "prefill" else [])):
                named = [row for row in rows if row["category"] == part and row["name"] not in ("q_norm", "k_norm")]
                found.append((phase["phase"], part, round(sum(row["gflop"] for row in named) * 1e9)))
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_sizes_are_exact(engine: Any) -> None:
    run = anatomy.generation(engine, 2, 20, 5, baseline=used(CPU))
    for name in ("model", "cache"):
        assert run["sizes"][name]["predicted"] == run["sizes"][name]["measured"], name
    assert len(run["token_s"]) == 5
    assert run["tokens_s"] > 0
    assert run["memory"]


def test_a_generation_without_a_cache(engine: Any) -> None:
    found = anatomy.without_cache(engine, 1, 16, 3)
    assert found["without_cache_ms"] > 0
    engine.begin(1, 16, 3)  # both ways give the same tokens
    engine.prefill()
    first = engine.last.tolist()
    engine.decode()
    decoded = engine.last.tolist()
    engine.begin(1, 16, 3)
    engine.prefill()
    assert engine.last.tolist() == first
    engine.without_cache()
    assert engine.last.tolist() == decoded


def test_a_memory_curve_sees_what_is_taken() -> None:
    tidy(CPU)
    with MemoryCurve(CPU, used(CPU)) as curve:
        taken = torch.ones(8 << 20)
        curve._done.wait(0.05)
    assert 0.9 * taken.nbytes < curve.peak < 1.5 * taken.nbytes


def test_the_window_of_a_histogram() -> None:
    counts = [0] * softmax.BINS
    middle = softmax.BINS // 2
    counts[middle - 1], counts[middle], counts[middle + 5] = 500, 499, 1
    assert softmax.window(counts, 0.99) == (-1.0, 1.0)
    assert softmax.window(counts, 0.9999) == (-1.0, 6.0)
    assert softmax.inside(counts, -1.0, 1.0) == pytest.approx(0.999)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    make_tiny("mixtral", made)
    return made


def test_the_command(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--context", "16", "--new", "4", "--rounds", "2", "--show", "operators,latency,cache,mha"]
    assert main(["profile", str(tiny), *limits, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    last = json.loads(out.splitlines()[-1])
    line = json.loads((tmp_path / "profile.json").read_text())
    assert {phase["engine"] for phase in line["phases"]} == {"diptych", "transformers"}
    assert [row["kv_heads"] for row in line["heads"]] == [6, 2]
    assert line["heads"][0]["cache_bytes"] == 3 * line["heads"][1]["cache_bytes"]
    assert {"commit", "torch", "machine"} <= set(line) & set(last)
    assert "Shares of a step" in out
    assert last["result"] == str(tmp_path / "profile.json")
    assert [phase["step_ms"] for phase in last["phases"]] == [phase["step_ms"] for phase in line["phases"]]
    assert len(json.dumps(last)) < len(json.dumps(line)) / 2


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["diptych", "transformers"])
def test_the_peak_of_real_weights_is_predicted(engine: str, demo_model: Path, tmp_path: Path) -> None:
    """Within 10 % on a CPU, in a process of its own, whose memory is the model's alone."""
    kept = tmp_path / "profile.json"
    limits = ["--context", "128", "--new", "8", "--show", "latency", "--engine", engine, "--out", str(kept)]
    command = [sys.executable, "-m", "diptych.cli", "profile", str(demo_model), *limits]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    (run,) = json.loads(kept.read_text())["generations"]
    assert run["sizes"]["model"]["measured"] == run["sizes"]["model"]["predicted"]
    assert run["sizes"]["cache"]["measured"] == run["sizes"]["cache"]["predicted"]
    assert run["sizes"]["peak"]["measured"] == pytest.approx(run["sizes"]["peak"]["predicted"], rel=0.1)


def test_table_six(tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole generations of both engines, the published ones beside them."""
    monkeypatch.setattr(table6, "PROMPT", 64)
    monkeypatch.setattr(table6, "NEW", 8)
    monkeypatch.setattr(table6, "ROUNDS", 1)
    assert main(["profile", str(tiny), "--context", "8", "--new", "2", "--rounds", "2", "--show", "table6"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])["table6"]
    assert (found["prompt"], found["new"], found["batch"]) == (64, 8, 1)
    assert [row["engine"] for row in found["rows"]] == ["diptych", "transformers"]
    assert all(row["tokens_s"] > 0 for row in found["rows"])
    assert "vLLM 90" in out


def test_plots_and_a_bar(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a person sees: PNG and SVG of each figure, and on a terminal how far it is."""
    pytest.importorskip("matplotlib")
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    limits = ["--context", "8,16", "--batch", "1,2", "--new", "3", "--rounds", "2", "--show", "operators,latency"]
    assert main(["profile", str(tiny), *limits, "--engine", "diptych", "--out", str(tmp_path)]) == 0
    drawn = {f"profile-{figure}.{kind}" for figure in ("operators", "shares", "latency") for kind in ("png", "svg")}
    assert drawn <= {path.name for path in tmp_path.iterdir()}
    assert all((tmp_path / name).stat().st_size > 1000 for name in drawn)
    phases = json.loads((tmp_path / "profile.json").read_text())["phases"]
    assert [(phase["batch"], phase["context"]) for phase in phases[::2]] == [(1, 8), (1, 16), (2, 8), (2, 16)]
    assert "operators" in terminal.getvalue()


def test_an_interruption_keeps_what_was_measured(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(measure, "_measure_heads", interrupted)
    limits = ["--context", "8", "--new", "2", "--rounds", "2", "--engine", "diptych", "--show", "operators,mha"]
    assert main(["profile", str(tiny), *limits]) == 130
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["interrupted"]
    assert line["phases"][0]["operators"][0]["wall"] is not None


def test_a_failure_keeps_what_was_measured(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Theirs, "prefill", failing)
    limits = ["--context", "8", "--new", "2", "--rounds", "2", "--show", "operators"]
    with pytest.raises(RuntimeError, match="out of memory"):
        main(["profile", str(tiny), *limits, "--out", str(tmp_path / "kept.json")])
    found = json.loads((tmp_path / "kept.json").read_text())
    assert found["failed"] == "RuntimeError: out of memory"
    assert [phase["engine"] for phase in found["phases"]] == ["diptych", "diptych"]
    assert "floor_ms" in found["phases"][0]["operators"][0]


def test_shapes_without_weights(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--context", "8", "--new", "2", "--rounds", "2", "--show", "latency", "--layers", "2"]
    assert main(["profile", str(tiny), *limits, "--load-format", "dummy", "--engine", "diptych"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["generations"][0]["engine"] == "diptych"


def test_the_softmax_range_of_real_weights(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "texts", lambda: ["The capital of France is Paris.", "Why is the sky blue?"])
    found = softmax.softmax_range(demo_model, torch.float32, CPU)
    low, high = found["window"]
    assert found["share_inside"] >= 0.9999
    assert low < found["smallest"] + 30
    assert high > 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["Baichuan2-13B"], "not supported yet"),
        (["chatglm3-6b"], "not supported yet"),
        (["/no/such"], "/no/such"),
        (["Llama-3-8B", "--show", "figure9"], "'figure9'"),
        (["Llama-3-8B", "--context", "a"], "--context"),
        (["Llama-3-8B", "--context", "9000"], "too long"),
        (["Llama-3-8B", "--show", "softmax"], "real ones"),
        (["Llama-3-8B", "--dtype", "int8"], "int8"),
        (["Llama-3-8B", "--new", "1"], "2 or more"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], word: str) -> None:
    assert main(["profile", *arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert word in said[0]


@pytest.mark.parametrize("name", ["BaichuanForCausalLM", "ChatGLMModel"])
def test_a_folder_of_a_model_to_come(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    assert main(["profile", str(tmp_path), "--load-format", "dummy"]) == 2
    assert "Baichuan2 and ChatGLM are not supported yet" in capsys.readouterr().err
