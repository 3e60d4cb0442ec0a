"""Draws docs/performance.md and its plots from benchmarks/results/: python -m benchmarks.performance

Every number there comes from a file here; nothing is typed in by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diptych.bench import plots
from diptych.profile import report
from diptych.profile.work import CATEGORIES

ROOT = Path(__file__).resolve().parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
PLOTS = DOCS / "plots"

PEERS = {(1, 1024): (4.97, 33_700), (32, 1024): (6.35, 42_900), (128, 1024): (11.1, 42_900), (32, 8000): (13.3, 38_200)}
"""vLLM 0.25.1 on the same kind of card, Llama-3-8B: milliseconds a token and prefill tokens/s by (batch, prompt)."""

HEAD = """# Performance

What this project says about speed and memory, from its own commands. This page is drawn from
[`benchmarks/results/`](../benchmarks/results) by `python -m benchmarks.performance`; change the results, not the page.

| command | measures |
|---|---|
| `diptych profile MODEL` | a step by operators, a generation's latency and memory, sizes predicted and measured |
| `diptych bench engine MODEL` | the engine's loop alone, against the floor that memory bandwidth sets |
| `diptych bench serve` | a service as clients see it |
| `… --compare A B`, `--search`, `--self-test` | two arrangements by turns; the highest load; the generator |

How to read it: latency counts from when a request was *due*, not from when it was sent. A step's operators are pieces
of one timeline: on a CPU cut at borders that are drawn around each operator, on a GPU the device's own account of the
step's kernels (results until 2026-12-03 have borders there too). "×" is time taken over the time that the machine needs
at least, by ceilings measured before and after; bytes are counted once, so what stays in a cache can beat its floor.
Our operators fuse what transformers runs one by one (norm and SiLU ride with a product), so what is "other" there is
partly "linear" here. Random weights are used where a shape is named, and cannot show the range of attention scores.
"""


def results(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file name, contents) of all results of a benchmark, newest last."""
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        if found.get("benchmark") == kind:
            yield path.name, found


def source(name: str, found: dict[str, Any]) -> str:
    """Where a section's numbers are from."""
    versions = ", ".join(f"{key} {found[key]}" for key in ("torch", "transformers", "triton", "grpcio") if key in found)
    machine = found.get("machine") or found.get("gpu") or "NVIDIA H200"
    commit = found.get("commit") or "named in [log.md](log.md)"
    load = found.get("load_average")
    note = f"; load average {load} at the end, others' work included" if load else ""
    told = f"{machine}{note}; {found['date']}; commit {commit}; {versions or 'versions not recorded'}"
    return f"*{told}; [{name}](../benchmarks/results/{name})*\n"


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)]) + "\n"


def engine() -> Iterator[str]:
    for name, found in results("engine"):
        yield f"### {found['model'].rsplit('/', 1)[-1]}\n"
        yield source(name, found)
        rows = [
            (f"{r['batch']} × {r['prompt']} → {r['new']}", r["tpot_ms"], r["floor_ms"], r["times_floor"],
             r["prefill_tokens_s"], *_peer(found, r))
            for r in found["rows"]
        ]  # fmt: skip
        head = ("batch × prompt → new", "ms a token", "floor", "×", "prefill tokens/s", "vLLM 0.25.1 ms", "its prefill")
        yield table(head, rows)
        if any(_peer(found, row) != NO_PEER for row in found["rows"]):
            yield _engine_plot(name.removesuffix(".json"), found)


NO_PEER = ("–", "–")


def _peer(found: dict[str, Any], row: dict[str, Any]) -> tuple[Any, Any]:
    """What the peer took for the row; it was measured for one model on one kind of card."""
    if found["model"] != "Llama-3-8B" or "H200" not in found.get("gpu", found.get("machine", "")):
        return NO_PEER
    return PEERS.get((row["batch"], row["prompt"]), NO_PEER)


def _engine_plot(name: str, found: dict[str, Any]) -> str:
    rows = [row | {"vllm_ms": peer} for row in found["rows"] if (peer := _peer(found, row)[0]) != "–"]
    labels = [f"{row['batch']}×{row['prompt']}" for row in rows]
    with plots.figure(PLOTS, name, f"{found['model']}: time a token") as axes:
        for offset, (key, label) in enumerate((("floor_ms", "floor"), ("tpot_ms", "diptych"), ("vllm_ms", "vLLM"))):
            places = [at + 0.27 * (offset - 1) for at in range(len(labels))]
            axes.bar(places, [row[key] for row in rows], 0.25, label=label, color=plots.COLOURS[offset])
        axes.set_xticks(range(len(labels)), labels)
        axes.set(ylabel="ms")
        axes.legend(fontsize=8)
    return f"![time a token](plots/{name}.svg)\n"


def service_gpu() -> Iterator[str]:
    for name, found in results("service_gpu"):
        lone, together = found["results"]["lone"], found["results"]["together"]
        yield "### The whole service, both roles on one card\n"
        yield source(name, found)
        yield (
            f"One request alone: first token {lone['ttft_ms']['median']} ms ({lone['ttft_ms']['min']} to"
            f" {lone['ttft_ms']['max']}), then {lone['step_ms']} ms a token; from the first to the second token"
            f" {lone['first_to_second_ms']['median']} ms, the hand-over between. Streams at once, a row a round:\n"
        )
        keys = ("tpot_ms", "itl_p50_ms", "itl_p99_ms", "first_to_second_p50_ms", "output_tokens_s")
        head = ("ms a token", "ITL p50", "ITL p99", "first to second p50, ms", "output tokens/s")
        yield table(head, [tuple(row[key] for key in keys) for row in together])


def decode_steps() -> Iterator[str]:
    for path in sorted(RESULTS.glob("*kernels*.json")):
        found = json.loads(path.read_text())
        yield "### Whole decode steps in one graph\n"
        yield source(path.name, found)
        rows = [
            (
                r["model"],
                f"{r['batch']} × {r['prompt']}",
                r["ms"],
                r["floor_ms"],
                r["times_floor"],
                r.get("vllm_ms", "–"),
            )
            for r in found["decode_step_ms"]
        ]
        yield table(("model", "batch × prompt", "ms a step", "floor", "×", "vLLM 0.25.1 ms"), rows)


def profiles() -> Iterator[str]:
    for name, found in results("profile"):
        found["model"] = found["model"].rsplit("/", 1)[-1]
        stem = name.removesuffix(".json")
        yield f"### {found['model']}, {found['dtype']}\n"
        yield source(name, found)
        limits = found["ceilings"]
        yield (
            f"Ceilings: {limits['read_gb_s']} GB/s read, {limits['gflop_s']} GFLOP/s; the walls meet at"
            f" {limits['ridge']} FLOP/byte.\n"
        )
        report.draw(PLOTS / stem, found)
        yield from _figures(found, stem)


def _figures(found: dict[str, Any], stem: str) -> Iterator[str]:
    phases = found.get("phases", [])
    if phases:
        yield "**Shares of a step** (figure 15)\n"
        rows = [
            (p["engine"], p["phase"], p["context"], p["step_ms"], f"{p['operators_over_step']:.1%}",
             f"{_recording(p):.1%}", p.get("method", "borders"), *(f"{p['shares'][kind]:.1%}" for kind in CATEGORIES))
            for p in phases
        ]  # fmt: skip
        head = ("engine", "phase", "context", "ms", "operators' sum", "recording costs", "told by", *CATEGORIES)
        yield table(head, rows)
        yield f"![shares](plots/{stem}/profile-shares.svg)\n"
        yield "**Operators** (figure 2), the longest context; the rest is in the results\n"
        longest = max(p["context"] for p in phases)
        for phase in (p for p in phases if p["context"] == longest):
            yield f"{phase['engine']}, {phase['phase']}:\n"
            yield _operators(phase)
        yield f"![operators](plots/{stem}/profile-operators.svg)\n"
    if found.get("generations"):
        yield "**Latency and memory** (figure 3), bytes\n"
        yield _generations(found["generations"])
        yield f"![latency and memory](plots/{stem}/profile-latency.svg)\n"
    yield from _rest(found, stem)


def _recording(phase: dict[str, Any]) -> float:
    """What recording adds to a step; results until 2026-12-03 keep it apart from the step."""
    return phase["recorded_over_step"] - 1 if "recorded_over_step" in phase else phase["profiling_cost"]


def _operators(phase: dict[str, Any]) -> str:
    rows = [
        (r["name"], r["calls"], " × ".join(map(str, r["shape"])), round(r["gflop"], 3), round(r["megabytes"], 2),
         r["intensity"], r["wall"], r["ms"], r["floor_ms"], r["times_floor"] or "", f"{r['share']:.1%}")
        for r in sorted(phase["operators"], key=lambda row: -row["ms"])
        if r["share"] >= 0.005
    ]  # fmt: skip
    head = ("operator", "calls", "M × K × N", "GFLOP", "MB", "FLOP/byte", "wall", "ms", "floor", "×", "share")
    return table(head, rows)


def _generations(runs: list[dict[str, Any]]) -> str:
    def pair(sizes: dict[str, int]) -> str:
        apart = sizes["measured"] / sizes["predicted"] - 1
        return f"{sizes['measured']:,} ({'exact' if apart == 0 else f'{apart:+.1%}'})"

    rows = [
        (r["engine"], f"{r['batch']} × {r['context']} → {r['new']}", r["first_token_ms"], r["per_token_ms"],
         r["generation_ms"], r["tokens_s"], r["requests_s"], *(pair(r["sizes"][k]) for k in ("model", "cache", "peak")))
        for r in runs
    ]  # fmt: skip
    head = ("engine", "run", "first token, ms", "a token, ms", "generation, ms", "tokens/s", "requests/s",
            "model (against predicted)", "KV cache", "peak memory")  # fmt: skip
    return table(head, rows)


def _rest(found: dict[str, Any], stem: str) -> Iterator[str]:
    if rows := found.get("without_cache"):
        yield "**What the KV cache is for**: milliseconds a token of the same generation\n"
        yield table(
            ("engine", "context", "with", "without", "×"),
            [(r["engine"], r["context"], r["with_cache_ms"], r["without_cache_ms"], r["ratio"]) for r in rows],
        )
    if rows := found.get("heads"):
        yield "**What grouped queries change**: the same shape with as many KV heads as query heads, random weights\n"
        yield table(
            ("KV heads", "context", "cache, bytes", "attention, ms", "step, ms", "share"),
            [(f"{r['kv_heads']} of {r['heads']}", r["context"], f"{r['cache_bytes']:,}", r["attention_ms"],
              r["step_ms"], f"{r['attention_share']:.1%}") for r in rows],
        )  # fmt: skip
    if soft := found.get("softmax"):
        low, high = soft["window"]
        yield (
            f"**Scores before softmax**: {soft['scores']:,} of them over {soft['prompts']} texts, from"
            f" {soft['smallest']} to {soft['largest']}; {soft['share_inside']:.4%} lie in [{low:g}, {high:g}], the"
            f" window for {soft['share']:.2%} (both sides alike, bins of {soft['bin']:g}).\n"
        )
        yield f"![scores](plots/{stem}/profile-softmax.svg)\n"
    if six := found.get("table6"):
        yield f"**Table 6's row**: batch 1, {six['prompt']} in, {six['new']} out, tokens/s of whole generations here\n"
        yield table(("engine", "tokens/s"), [(row["engine"], row["tokens_s"]) for row in six["rows"]])
        published = ", ".join(f"{name} {rate}" for name, rate in six["published_a100_llama_2_7b"].items())
        yield f"As published, for Llama-2-7B on an A100 (not comparable with another model or machine): {published}.\n"


def service_cpu() -> Iterator[str]:
    for name, found in results("service_cpu"):
        yield "### The whole service against transformers, and its two arrangements\n"
        yield source(name, found)
        measured = found["results"]
        one, eight, gap = (measured[key] for key in list(measured)[:3])
        best = min(one["transformers_ms_a_token"].values(), key=lambda cache: float(cache["median"]))
        yield (
            f"One request of 128 + 128 tokens: {_ranged(one['ms_a_token'])} ms a token, transformers"
            f" {_ranged(best)}; ratio of pairs {_ranged(one['ratio_to_faster_cache'])}. Eight at once:"
            f" {_ranged(eight['ratio'])} times the tokens/s of one. First to second token: alone"
            f" {gap['lone_gap_p95_ms']} ms at p95, loaded {gap['loaded_gap_p50_ms']} ms at p50.\n"
        )
        head = (
            "while prompts of 768 tokens arrive",
            "TTFT, ms",
            "of the long ones",
            "ms a token",
            "ITL p50",
            "ITL p99",
        )
        rows = [
            (key.split(",")[0], _ranged(r["ttft_ms"]), _ranged(r["long_ttft_ms"]), _ranged(r["ms_a_token"]),
             r["itl_p50_ms"], r["itl_p99_ms"])
            for key, r in measured.items() if "arriving" in key
        ]  # fmt: skip
        yield table(head, rows)


def _ranged(values: dict[str, float]) -> str:
    return f"{values['median']} ({values['min']}–{values['max']})"


def comparisons() -> Iterator[str]:
    for name, found in results("bench-compare"):
        names = found["configurations"]
        yield f"### {' against '.join(names)}\n"
        yield source(name, found)
        measured: list[tuple[Any, ...]] = []
        tested: list[tuple[Any, ...]] = []
        for cell in found["cells"]:
            where = f"{cell['workload']}, {cell['load']}"
            for metric, verdict in cell["verdicts"].items():
                label = metric.replace("_", " ")
                spreads = (verdict["sides"][side] for side in names)
                measured.append(
                    (where, label, *(f"{v['median']:.1f} ({v['min']:.1f}–{v['max']:.1f})" for v in spreads))
                )
                tested += [
                    (where, label, f"{pair['b']} / {pair['a']}", pair["ratio"] or "–", pair["p_holm"], pair["better"])
                    for pair in verdict["pairs"] if pair["better"]
                ]  # fmt: skip
        verdicts = [verdict for cell in found["cells"] for verdict in cell["verdicts"].values()]
        rounds = max(pair["rounds"] for verdict in verdicts for pair in verdict["pairs"])
        yield f"Medians over {rounds} rounds, and their range:\n"
        yield table(("load", "metric", *names), measured)
        if tested:
            yield "Differences beyond chance, p corrected for the number of pairs (Holm):\n"
            yield table(("load", "metric", "", "ratio", "p", "better"), tested)
        yield "\n".join(f"- {sentence}" for sentence in found["conclusion"]) + "\n"


def generator() -> Iterator[str]:
    for name, found in results("bench-self-test"):
        yield "### The load generator itself, against a stub in a process of its own\n"
        yield source(name, found)
        closed = found["closed"]
        yield (
            f"{closed['requests_s']} requests/s and {closed['tokens_s']} tokens/s, {closed['concurrency']} at once,"
            f" {found['scheduling']} priority.\n"
        )
        rows = [
            (f"{r['rate']:g}", r["requests_s"], r["tokens_s"], r["sending_ms"]["p50"], r["sending_ms"]["p99"],
             r["receiving_ms"]["p50"], r["receiving_ms"]["p99"], r["added_ms"]["p50"], r["added_ms"]["p99"])
            for r in found["open"]
        ]  # fmt: skip
        head = ("rate", "requests/s", "tokens/s", "adds sending, ms p50", "p99", "receiving at most, ms p50", "p99",
                "together at most, ms p50", "p99")  # fmt: skip
        yield table(head, rows)


def main() -> None:
    sections = (
        ("## The engine\n", engine), ("", decode_steps), ("", service_gpu), ("## Anatomy\n", profiles),
        ("## The service on a CPU\n", service_cpu), ("", comparisons), ("", generator),
    )  # fmt: skip
    parts = [HEAD]
    for title, section in sections:
        made = list(section())
        parts += [title] * bool(title and made) + made
    (DOCS / "performance.md").write_text("\n".join(parts))
    for drawn in PLOTS.rglob("*.png"):  # the page shows the SVG
        drawn.unlink()


if __name__ == "__main__":
    main()
