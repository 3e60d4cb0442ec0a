"""A profile for people: tables of a terminal, and the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diptych.bench import plots
from diptych.profile.work import CATEGORIES

_SMALL = 0.002  # of a step: rows below are summed in one


def tables(found: dict[str, Any]) -> str:
    said: list[str] = []
    if limits := found.get("ceilings"):
        said.append(
            f"{found['model']}, {found['dtype']}. Ceilings measured now: {limits['read_gb_s']} GB/s read,"
            f" {limits['gflop_s']} GFLOP/s; the walls meet at {limits['ridge']} FLOP/byte."
        )
    said += [_phase(phase) for phase in found.get("phases", ())]
    said += _shares(found.get("phases", []))
    said += [_generation(each) for each in found.get("generations", ())]
    said += [
        f"Without a KV cache, {each['engine']}, {each['context']} tokens: {each['without_cache_ms']:.1f} ms a token"
        f" against {each['with_cache_ms']:.1f} with it, × {each['ratio']}"
        for each in found.get("without_cache", ())
    ]
    said += [
        f"{each['kv_heads']:3} KV heads of {each['heads']}, context {each['context']:6}: {each['cache_bytes']:12,}"
        f" bytes, attention {each['attention_ms']:.3f} of {each['step_ms']:.2f} ms ({each['attention_share']:.0%})"
        for each in found.get("heads", ())
    ]
    if soft := found.get("softmax"):
        said.append(_softmax(soft))
    if table := found.get("table6"):
        said.append(_table6(table, found["model"]))
    return "\n".join(said)


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """What one line can hold of a profile that is kept elsewhere: each figure's headline, no operators, no curves."""
    heads = {
        "phases": ("engine", "phase", "batch", "context", "captured", "method", "step_ms", "operators_over_step",
                   "recorded_over_step", "shares"),
        "generations": ("engine", "batch", "context", "new", "first_token_ms", "per_token_ms", "tokens_s", "sizes"),
        "without_cache": ("engine", "context", "ratio"),
    }  # fmt: skip
    short = {key: value for key, value in found.items() if key not in (*heads, "softmax", "heads", "stages")}
    for key, names in heads.items():
        if rows := found.get(key):
            short[key] = [{name: row[name] for name in names} for row in rows]
    return short


def _phase(phase: dict[str, Any]) -> str:
    form = ", one graph" if phase["captured"] else ""
    said = [
        f"\n{phase['engine']}, {phase['phase']}, {phase['batch']} x {phase['context']}: {phase['step_ms']:.3f} ms"
        f" a step (median {phase['median_ms']:.3f}{form}), {phase['recorded_over_step']:.1%} of it while recorded;"
        f" operators add up to {phase['operators_ms']:.3f} ({phase['operators_over_step']:.1%}), by {phase['method']}",
        f"  {'operator':26} {'calls':>5} {'M x K x N':>20} {'GFLOP':>9} {'MB':>9} {'FLOP/B':>8} {'wall':>8}"
        f" {'ms':>9} {'floor':>9} {'×':>6} {'share':>6}",
    ]
    if phase["note"]:
        said.insert(1, f"  {phase['note']}")
    for row in sorted(phase["operators"], key=lambda row: -row["ms"]):
        if row["share"] < _SMALL:
            continue
        shape = " x ".join(map(str, row["shape"]))
        times = f"{row['times_floor']:.1f}" if row["times_floor"] else ""
        said.append(
            f"  {row['name']:26} {row['calls']:5} {shape:>20} {row['gflop']:9.3f} {row['megabytes']:9.2f}"
            f" {row['intensity']:8.1f} {row['wall']:>8} {row['ms']:9.3f} {row['floor_ms']:9.3f} {times:>6}"
            f" {row['share']:6.1%}"
        )
    return "\n".join(said)


def _shares(phases: list[dict[str, Any]]) -> list[str]:
    if not phases:
        return []
    said = ["\nShares of a step" + " " * 23 + "".join(f"{kind:>13}" for kind in CATEGORIES)]
    for phase in phases:
        name = f"{phase['engine']}, {phase['phase']}, {phase['batch']} x {phase['context']}"
        said.append(f"  {name:36} " + "".join(f"{phase['shares'][kind]:13.1%}" for kind in CATEGORIES))
    return said


def _generation(found: dict[str, Any]) -> str:
    sizes = found["sizes"]
    said = [
        f"\n{found['engine']}, {found['batch']} x {found['context']} in, {found['new']} out: first token"
        f" {found['first_token_ms']:.1f} ms, {found['per_token_ms']:.2f} ms a token, generation"
        f" {found['generation_ms']:.0f} ms; {found['tokens_s']:.1f} tokens/s, {found['requests_s']:.3f} requests/s"
    ]
    for name, label in (("model", "model"), ("cache", "KV cache"), ("peak", "peak memory")):
        predicted, measured = sizes[name]["predicted"], sizes[name]["measured"]
        apart = f"{measured / predicted - 1:+.1%}" if measured != predicted else "the same"
        said.append(f"  {label:12} predicted {predicted:15,} bytes, measured {measured:15,} ({apart})")
    return "\n".join(said)


def _softmax(found: dict[str, Any]) -> str:
    low, high = found["window"]
    return (
        f"\nScores before softmax over {found['prompts']} texts ({found['scores']:,} scores): {found['smallest']} to"
        f" {found['largest']}; {found['share_inside']:.4%} lie in [{low:g}, {high:g}], the window for"
        f" {found['share']:.2%}"
    )


def _table6(found: dict[str, Any], model: str) -> str:
    said = [f"\nTable 6's row on this machine, {model}, batch 1, {found['prompt']} in, {found['new']} out, tokens/s:"]
    said += [f"  {row['engine']:16} {row['tokens_s']:8.1f}" for row in found["rows"]]
    published = ", ".join(f"{name} {rate}" for name, rate in found["published_a100_llama_2_7b"].items())
    return "\n".join([*said, f"  published (Llama-2-7B on an A100, another machine): {published}"])


def draw(folder: Path, found: dict[str, Any]) -> None:
    """profile-*.png and .svg, for what was measured."""
    if not plots.can_draw():
        return
    if found.get("phases"):
        _draw_operators(folder, found)
        _draw_shares(folder, found)
    if found.get("generations"):
        _draw_generations(folder, found)
    if found.get("softmax"):
        _draw_softmax(folder, found)


def _draw_operators(folder: Path, found: dict[str, Any]) -> None:
    """The roofline: each operator's rate at its intensity, under the two walls of this machine."""
    limits = found["ceilings"]
    with plots.figure(folder, "profile-operators", f"{found['model']}: operators under this machine's walls") as axes:
        xs = [10 ** (step / 10) for step in range(-20, 40)]
        walls = [min(limits["gflop_s"], x * limits["read_gb_s"]) for x in xs]
        axes.loglog(xs, walls, color="black", linewidth=1, label="walls")
        kinds = list(dict.fromkeys((phase["engine"], phase["phase"]) for phase in found["phases"]))
        for kind, colour in zip(kinds, plots.COLOURS, strict=False):
            rows = [row for p in found["phases"] if (p["engine"], p["phase"]) == kind for row in p["operators"]]
            points = [
                (row["intensity"], row["gflop"] / row["ms"] * 1e3) for row in rows if row["gflop"] and row["wall"]
            ]
            if points:
                axes.scatter(*zip(*points, strict=True), s=12, color=colour, label=", ".join(kind))
        axes.set(xlabel="FLOP/byte", ylabel="GFLOP/s")
        axes.legend(fontsize=7)


def _draw_shares(folder: Path, found: dict[str, Any]) -> None:
    """Figure 15: a panel for prefill and one for decode, bars of both engines by context."""
    with plots.figure(folder, "profile-shares", f"{found['model']}: share of time against context", 2) as axes:
        for axis, name in zip(axes, ("prefill", "decode"), strict=True):
            phases = [phase for phase in found["phases"] if phase["phase"] == name]
            labels = [f"{p['engine']}\n{p['batch']}×{p['context']}" for p in phases]
            parts: dict[str, list[float]] = {kind: [p["shares"][kind] for p in phases] for kind in CATEGORIES}
            plots.stacked(axis, labels, parts, "share of a step")
            axis.set(title=name)


def _draw_generations(folder: Path, found: dict[str, Any]) -> None:
    """Figure 3: memory over time with the moments of the tokens, a panel a run."""
    runs = found["generations"]
    title = f"{found['model']}: a generation's memory and tokens"
    with plots.figure(folder, "profile-latency", title, len(runs)) as made:
        for axis, run in zip([made] if len(runs) == 1 else made, runs, strict=True):
            sizes = run["sizes"]
            held, steps = sizes["held"], len(run["token_s"])
            token = sizes["cache"]["predicted"] / (run["context"] + run["new"])
            cache = [held + token * (run["context"] + step) for step in range(steps)]
            axis.plot(
                [s for s, _ in run["memory"]], [m / 1e6 for _, m in run["memory"]], label="measured", color="black"
            )
            axis.step(run["token_s"], [size / 1e6 for size in cache], where="post", label="weights + cache in use")
            axis.axhline(held / 1e6, linestyle=":", color="grey", label="weights")
            axis.axhline(sizes["peak"]["predicted"] / 1e6, linestyle="--", color="#b03a48", label="predicted peak")
            axis.plot(run["token_s"], [held / 1e6 * 0.98] * steps, "|", color="#2f6fb0", label="tokens")
            axis.set(
                xlabel="seconds", ylabel="MB", title=f"{run['engine']}, {run['batch']}×{run['context']}+{run['new']}"
            )
            axis.legend(fontsize=6)


def _run(run: dict[str, Any]) -> str:
    return f"{run['engine']}, {run['batch']}×{run['context']}+{run['new']}"


def _draw_softmax(folder: Path, found: dict[str, Any]) -> None:
    soft = found["softmax"]
    width, counts = soft["bin"], soft["histogram"]
    reach = width * len(counts) / 2
    used = [(-reach + at * width, count) for at, count in enumerate(counts) if count]
    with plots.figure(folder, "profile-softmax", f"{found['model']}: attention scores before softmax") as axes:
        axes.bar([x for x, _ in used], [count for _, count in used], width=width, align="edge", log=True)
        for edge in soft["window"]:
            axes.axvline(edge, color="#b03a48", linestyle="--")
        axes.set(xlabel="score", ylabel="scores")
