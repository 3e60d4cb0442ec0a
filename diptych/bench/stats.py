"""From records to numbers: percentiles, rates, goodput under an objective, and whether a difference is one.

Knows no server and no clock.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diptych.contract.errors import ConfigInvalid

if TYPE_CHECKING:  # statistics need no gRPC
    from diptych.bench.load import Record

SHARES = (0.5, 0.9, 0.95, 0.99)
METRICS = ("ttft", "tpot", "itl", "e2e")
_UNITS = {"ms": 1e-3, "s": 1.0}
_EXACT = 12  # pairs up to which all sign flips are tried
ALPHA = 0.05


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True)
class Objective:
    """Upper limits in seconds by metric; a request meets it when all hold for it. ITL is a request's p99 gap."""

    limits: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Objective:
        """As `ttft=500ms,tpot=50ms`."""
        limits = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            unit = next((unit for unit in _UNITS if value.endswith(unit)), "")
            try:
                limits[name] = float(value.removesuffix(unit)) * _UNITS[unit]
            except (ValueError, KeyError):
                raise ConfigInvalid(f"Objective {part!r} is not NAME=NUMBER with ms or s, as ttft=500ms.") from None
            if name not in METRICS:
                raise ConfigInvalid(f"Objective {part!r}: no such metric; there are {', '.join(METRICS)}.")
            if not 0 < limits[name] < math.inf:
                raise ConfigInvalid(f"Objective {part!r} can be met by no request; it must be above 0.")
        return cls(limits)

    def met(self, record: Record) -> bool:
        if not record.ok:
            return False
        found = {"ttft": record.ttft, "e2e": record.e2e, "tpot": record.tpot or 0.0}
        found["itl"] = percentile(record.itl, 0.99) if record.itl else 0.0
        return all(found[name] <= limit for name, limit in self.limits.items())

    def __str__(self) -> str:
        return ", ".join(f"{name} ≤ {limit * 1e3:g} ms" for name, limit in self.limits.items())


def samples(records: Sequence[Record]) -> dict[str, list[float]]:
    """Seconds by metric, of the requests that were answered whole."""
    good = [record for record in records if record.ok]
    return {
        "ttft": [record.ttft for record in good],
        "tpot": [tpot for record in good if (tpot := record.tpot) is not None],
        "itl": [gap for record in good for gap in record.itl],
        "e2e": [record.e2e for record in good],
    }


def summary(records: Sequence[Record], objective: Objective | None = None) -> dict[str, Any]:
    """One run in numbers, milliseconds. The run lasts from the first due request until the last piece."""
    good = [record for record in records if record.ok]
    found: dict[str, Any] = {"requests": len(records), "answered": len(good), "errors": _errors(records)}
    if not good:
        return found
    took = max(record.end for record in good) - min(record.due for record in records)
    found["seconds"] = round(took, 3)
    found["requests_s"] = round(len(good) / took, 3)
    found["prompt_tokens_s"] = round(sum(record.prompt for record in good) / took, 1)
    found["output_tokens_s"] = round(sum(record.tokens for record in good) / took, 1)
    for name, values in samples(records).items():
        if values:
            found[f"{name}_ms"] = {
                "mean": round(statistics.fmean(values) * 1e3, 3),
                **{f"p{share * 100:g}": round(percentile(values, share) * 1e3, 3) for share in SHARES},
            }
    found["late_ms_p99"] = round(percentile([record.sent - record.due for record in records], 0.99) * 1e3, 3)
    if objective is not None:
        met = sum(map(objective.met, records))
        found |= {"met": round(met / len(records), 4), "goodput_requests_s": round(met / took, 3)}
    return found


def _errors(records: Sequence[Record]) -> dict[str, int]:
    errors = [record.error or "Empty" for record in records if not record.ok]
    return {name: errors.count(name) for name in sorted(set(errors))}


def sign_flip(differences: Sequence[float], seed: int = 0) -> float:
    """The two-sided p of paired differences: how often their mean would be as far from 0 if the signs were chance. All
    signs are tried up to 12 pairs, 10,000 draws beyond; n pairs can give no less than 2 / 2^n."""
    if not differences:
        return 1.0
    seen = abs(sum(differences)) * (1 - 1e-12)
    if len(differences) <= _EXACT:
        flips = list(itertools.product((1, -1), repeat=len(differences)))
    else:
        draw = random.Random(seed)
        flips = [tuple(draw.choice((1, -1)) for _ in differences) for _ in range(10_000)]
    far = sum(abs(sum(sign * value for sign, value in zip(flip, differences, strict=True))) >= seen for flip in flips)
    return far / len(flips)


def least_p(pairs: int) -> float:
    """The least that a sign-flip test of so many pairs can give."""
    return 2.0 / 2**pairs if pairs else 1.0


def fewest_rounds(tests: int) -> int:
    """So many pairs does each of `tests` sign-flip tests need before one of them can be beyond chance after `holm`."""
    return next(rounds for rounds in itertools.count(1) if tests * least_p(rounds) <= ALPHA)


def holm(found: Sequence[float]) -> list[float]:
    """p of several tests, each corrected for being one of them (Holm's step-down form of Bonferroni's), in order."""
    corrected, least = [0.0] * len(found), 0.0
    for place, at in enumerate(sorted(range(len(found)), key=lambda at: found[at])):
        least = max(least, min(1.0, (len(found) - place) * found[at]))
        corrected[at] = least
    return corrected


def crossing(xs: Sequence[float], a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Where the lines through (x, a) and (x, b) cross, between the points by straight lines; where they only touch or
    are one they do not."""
    found = []
    gaps = [(x, left - right) for x, left, right in zip(xs, a, b, strict=True)]
    apart = [point for point in gaps if point[1]]
    for (x0, g0), (x1, g1) in itertools.pairwise(apart):
        if g0 * g1 < 0:
            meeting = [x for x, gap in gaps if not gap and x0 < x < x1]
            found.append(meeting[0] if meeting else x0 + (x1 - x0) * g0 / (g0 - g1))
    return found
