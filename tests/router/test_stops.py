"""Stop strings: what goes out, what is held, and that the cutting of the text does not matter."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from diptych.router.stops import StopMatcher

TEXT = st.text("abc\n", max_size=40)
STOPS = st.lists(st.text("abc\n", min_size=1, max_size=5), max_size=4, unique=True)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The match that ends first, of those the longest, by looking everywhere."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher, out = StopMatcher(stops), ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        out += text
        if stop is not None:
            return out, stop
    return out + matcher.finish(), None


@given(TEXT, STOPS, st.lists(st.integers(0, 40)))
def test_any_cutting_gives_the_same(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(borders)]
    assert run(pieces, stops) == naive(text, stops)


@given(TEXT, STOPS)
def test_holds_back_exactly_what_may_still_match(text: str, stops: list[str]) -> None:
    matcher, out = StopMatcher(stops), ""
    for index, char in enumerate(text, 1):
        more, stop = matcher.push(char)
        out += more
        if stop is not None:
            return
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        held = max((length for length in range(index + 1) if text[index - length : index] in beginnings), default=0)
        assert out == text[: index - held]


def test_the_named_cases() -> None:
    assert run([" Paris", ".", "\n", "\n", "The", " answer"], ["ris.\n\nThe a"]) == (" Pa", "ris.\n\nThe a")
    assert run([" is", ":"], ["is:!"]) == (" is:", None)
    assert run([" Paris.", "\n", "\n", "The", " answer"], ["\n\nThe", "\n\nThe answer"]) == (" Paris.", "\n\nThe")
    assert run(["a" * 50], ["a" * 50]) == ("", "a" * 50)
