"""How far a start is, from the engines' words to what a terminal shows."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from diptych.cluster.config import validate
from diptych.cluster.local import LocalCluster
from diptych.cluster.supervisor import GroupState
from diptych.progress import Progress
from diptych.workers.channel import Loading
from diptych.workers.engines import together


def test_a_group_shows_weights_until_its_last_rank_captures() -> None:
    first = {"weights": Loading("weights", 50, 100)}
    assert together([first, {}]) == Loading("weights", 50, 100)
    first |= {"weights": Loading("weights", 100, 100), "graphs": Loading("graphs", 1, 9)}
    second = {"weights": Loading("weights", 40, 100)}
    assert together([first, second]) == Loading("weights", 140, 200)
    second |= {"weights": Loading("weights", 100, 100), "graphs": Loading("graphs", 0, 9)}
    assert together([first, second]) == Loading("graphs", 1, 18)


def state(state: Literal["placing", "loading", "ready"], what: str = "", loaded: float = 0.0) -> GroupState:
    return GroupState("decode-0", state, 12.3, 1, what, loaded)


def test_a_terminal_shows_what_is_under_way_and_how_far() -> None:
    shown = Progress()._moment
    assert shown([state("placing")]) == "decode-0 placing 12 s"
    assert shown([state("loading", "weights", 0.5)]) == "decode-0 weights ━━━━━━╌╌╌╌╌╌ 50% 12 s"
    assert shown([state("loading", "graphs", 1.0)]) == "decode-0 graphs ━━━━━━━━━━━━ 100% 12 s"
    assert shown([state("ready")]) == "Serving; Ctrl-C stops"


async def test_what_an_engine_says_reaches_the_launcher(shallow_model: Path) -> None:
    config = validate({"model": str(shallow_model), "roles": "colocated"})
    cluster = LocalCluster(config.groups(), b"s", config.limits)
    await cluster.start()
    try:
        (group,) = cluster.supervisor.states()
        assert (group.state, group.what, group.loaded) == ("ready", "weights", 1.0)
    finally:
        await cluster.stop(drain=False)
