"""Another process's clock: the true offset lies within the stated error, whatever the delays are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diptych.router.clocks import Clock

DELAY = st.integers(0, 5_000_000)


@given(
    offset=st.integers(-(10**12), 10**12),
    sent=st.lists(DELAY, min_size=1, max_size=20),
    received=st.lists(DELAY, min_size=1, max_size=20),
)
def test_the_truth_is_inside(offset: int, sent: list[int], received: list[int]) -> None:
    clock, now = Clock(), 10**12
    for delay in sent:
        now += 1_000_000
        clock.sent(now, now + delay - offset)
    for delay in received:
        now += 1_000_000
        clock.received(now - offset, now + delay)
    estimate, error = clock.estimate()
    assert abs(estimate - offset) <= error + 1


def test_one_machine_has_one_clock() -> None:
    clock = Clock()
    clock.sent(1_000_000, 1_200_000)
    clock.received(2_000_000, 2_300_000)
    assert clock.estimate() == (0, 300_000)


def test_a_drifting_clock_is_followed() -> None:
    """A second of silence lets a bound grow; a newer event, even a slower one, then takes its place."""
    clock = Clock()
    clock.sent(0, 10_000)
    clock.received(5_000_000, 5_010_000)
    hour = 3_600 * 10**9
    drift = 50 * 3_600 * 1000  # 50 ppm for an hour
    clock.received(hour - drift, hour + 20_000)
    clock.sent(hour, hour - drift + 20_000)
    estimate, error = clock.estimate()
    assert abs(estimate - drift) <= error + 1
    assert error < 50_000
