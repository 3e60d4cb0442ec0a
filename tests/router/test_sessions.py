"""What a session keeps of its worker's load messages."""

from __future__ import annotations

from typing import Any

from diptych.contract.wire import Load
from tests.router.test_choice import session


class Deaf:
    def on_change(self) -> None:
        pass


def test_a_prefix_gained_and_lost_in_one_report_is_not_held() -> None:
    kept = session("d", "decode")
    listener: Any = Deaf()
    kept._on_load(Load(clock=(0, 0), gained=(b"a", b"b"), lost=(b"a",)), listener)
    assert list(kept.prefixes) == [b"b"]
    kept._on_load(Load(clock=(0, 0), gained=(b"c",), lost=(b"b",)), listener)
    assert list(kept.prefixes) == [b"c"]
