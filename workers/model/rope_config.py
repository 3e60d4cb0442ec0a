"""The rotary embedding's configuration, in both spellings of config.json."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.contract.errors import ModelUnsupported
from diptych.workers.model.family import Family
from diptych.workers.model.values import Values, shown

_KEYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True)
class RopeConfig:
    """kind: default, linear (all frequencies divided by `factor`) or llama3 (long waves divided by `factor`, short ones
    kept, a ramp between: Llama 3.1's). dim: the rotated part of a head, an even number."""

    theta: float
    dim: int
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 1.0
    original: int = 0

    @classmethod
    def of(cls, read: Values, family: Family, head_dim: int, max_positions: int) -> RopeConfig:
        """Reads config.json. Newer files keep everything in `rope_parameters`, older ones the base in `rope_theta` and
        the rest in `rope_scaling`, whose type is `type` or `rope_type`. Where both speak, the inner value wins, as in
        transformers; two dictionaries that differ are refused. Raises `ModelUnsupported`."""
        inner, outer = read.table("rope_parameters"), read.table("rope_scaling")
        if inner.found and outer.found and inner.found != outer.found:
            raise ModelUnsupported(f"{read.file} sets both rope_parameters and rope_scaling, and they differ.")
        found = inner if inner.found else outer
        kind = found.text("rope_type") or found.text("type") or "default"
        if kind not in family.rope_types:
            raise ModelUnsupported(f"rope_type {shown(kind)} is not supported for {family.architecture}.")
        _check_keys(found, kind, original_known=kind == "llama3")
        theta = found.number("rope_theta", read.number("rope_theta", family.theta, least=1.0), least=1.0)
        dim = _rotated(found, read, family, head_dim)
        if kind == "default":
            return cls(theta, dim)
        factor = found.number("factor", least=1.0)
        if kind == "linear":
            return cls(theta, dim, kind, factor)
        low, high = found.number("low_freq_factor"), found.number("high_freq_factor")
        if low >= high:
            raise ModelUnsupported(
                f"{found.file} gives low_freq_factor = {low:g} and high_freq_factor = {high:g}; the second must be"
                " larger."
            )
        original = found.size("original_max_position_embeddings", max_positions)
        return cls(theta, dim, kind, factor, low, high, original)


def _rotated(found: Values, read: Values, family: Family, head_dim: int) -> int:
    """How many elements of a head are rotated, two by two."""
    key = "partial_rotary_factor"
    partial = found.number(key, read.number(key, 1.0))
    if partial != 1.0 and not family.partial:
        raise ModelUnsupported(f"{key} {partial:g} is not supported for {family.architecture}.")
    if partial > 1.0:
        raise (found if key in found else read).wrong(key, "at most 1")
    dim = int(head_dim * partial)
    if dim < 2 or dim % 2:
        raise ModelUnsupported(
            f"{read.file} asks for a rotary embedding of {dim} of the head_dim {head_dim} elements, which must be a"
            " positive even number."
        )
    return dim


def _check_keys(found: Values, kind: str, original_known: bool) -> None:
    given = set(found.given()) - _COMMON
    optional = {"original_max_position_embeddings"} if original_known else set[str]()
    if missing := _KEYS[kind] - given - optional:
        raise ModelUnsupported(
            f"rope_type {kind!r} needs {', '.join(sorted(missing))}, which {found.file} does not give."
        )
    if surplus := given - _KEYS[kind]:
        if kind == "default" and surplus <= {"factor", "original_max_position_embeddings"}:
            return
        raise ModelUnsupported(f"rope_type {kind!r} does not know {', '.join(map(shown, sorted(surplus)))}.")
