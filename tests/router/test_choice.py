"""One choice, whatever order its workers' messages come in: tokens once and in order, one terminal event, one close."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.contract.errors import Cancelled, DecodeLost, PrefillLost, TransferFailed, WorkerLost
from diptych.contract.limits import Limits
from diptych.contract.request import Key, Request, Stopping
from diptych.contract.wire import (
    Cancel,
    Ended,
    Granted,
    Logprob,
    Prefill,
    Reserve,
    Start,
    TokenOut,
    WorkerInfo,
    to_worker,
)
from diptych.router.choice import Choice, Part
from diptych.router.detokenizer import Detokenizer
from diptych.router.sessions import Session
from diptych.router.text import TextStream

KEY = Key("r-0")
PIECES = [bytes([65 + n]) for n in range(20)]  # token n is the n-th letter


@dataclass
class Heard:
    """A choice's owner that writes down what it is told."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    terminals: int = 0
    closes: int = 0

    def on_text(self, choice: Choice, text: str, ids: tuple[int, ...], logprobs: tuple[Logprob, ...]) -> None:
        assert not self.terminals
        self.text += text
        self.ids += ids

    def on_terminal(self, choice: Choice) -> None:
        self.terminals += 1

    def on_prompt_known(self, choice: Choice) -> None:
        pass

    def on_closed(self, choice: Choice) -> None:
        assert self.terminals == 1
        self.closes += 1


def session(name: str, role: str) -> Session:
    """A real session whose messages stay in its queue: its stream is never opened."""
    info = WorkerInfo(name, role, "127.0.0.1:1", "", "e", "d", 1, (2,), 16, 100, 1000)  # type: ignore[arg-type]
    made = Session(info, "router", b"secret", Limits())
    made.open = True
    return made


def sent(to: Session) -> list[object]:
    return [to_worker.decode(data) for data in to._outgoing]


def begun(tokens: int = 6, stops: tuple[str, ...] = ()) -> tuple[Choice, Heard, Part, Part]:
    stopping = Stopping(tokens)
    heard = Heard()
    choice = Choice(heard, 0, TextStream(Detokenizer(PIECES), stopping, stops), KEY)
    prefill, decode = session("p", "prefill"), session("d", "decode")
    choice.begin(Request(KEY, (1, 2), stopping), prefill, decode, None)
    assert choice.prefill is not None
    assert choice.decode is not None
    return choice, heard, choice.prefill, choice.decode


def tokens(position: int, *ids: int) -> TokenOut:
    return TokenOut(KEY, position, ids)


def test_the_usual_life() -> None:
    choice, heard, prefill, decode = begun()
    assert [type(m) for m in sent(decode.session) + sent(prefill.session)] == [Reserve, Prefill]
    choice.on_granted(Granted(KEY, 16))
    assert sent(prefill.session)[-1] == Start(KEY, 16)
    choice.on_tokens(prefill, tokens(0, 0), 1)
    choice.on_ended(prefill, Ended(KEY, "handed", cached=16))
    choice.on_tokens(decode, tokens(1, 1, 2), 2)
    choice.on_ended(decode, Ended(KEY, "length"))
    assert (heard.text, heard.terminals, heard.closes, choice.next, choice.cached) == ("ABC", 1, 1, 3, 16)
    assert not any(isinstance(m, Cancel) for m in sent(prefill.session) + sent(decode.session))
    assert (prefill.session.outstanding, decode.session.outstanding) == (0, 0)


@given(cut=st.integers(0, 8), repeats=st.lists(st.integers(0, 5), max_size=3))
def test_two_workers_messages_may_cross(cut: int, repeats: list[int]) -> None:
    """Each worker's own order is kept; everything else may happen, doubled messages too."""
    choice, heard, prefill, decode = begun()
    of_prefill = [
        lambda: choice.on_tokens(prefill, tokens(0, 0), 1),
        lambda: choice.on_ended(prefill, Ended(KEY, "handed")),
    ]
    of_decode = [lambda p=p: choice.on_tokens(decode, tokens(p, p), p) for p in range(1, 6)]
    for again in repeats:
        of_decode.insert(again, of_decode[again - 1] if again else of_decode[0])
    of_decode.append(lambda: choice.on_ended(decode, Ended(KEY, "length")))
    for act in of_decode[:cut] + of_prefill + of_decode[cut:]:
        act()
    assert (heard.ids, heard.terminals, heard.closes) == ([0, 1, 2, 3, 4, 5], 1, 1)


def test_a_stop_string_cancels_and_counts_to_the_match() -> None:
    choice, heard, prefill, decode = begun(stops=("CD",))
    choice.on_tokens(prefill, tokens(0, 0), 1)
    choice.on_ended(prefill, Ended(KEY, "handed"))
    choice.on_tokens(decode, tokens(1, 1, 2, 3, 4), 2)
    assert choice.terminal is not None
    assert (heard.text, heard.ids, choice.next, choice.terminal.stop_string) == ("AB", [0, 1, 2, 3], 4, "CD")
    assert isinstance(sent(decode.session)[-1], Cancel)
    choice.on_tokens(decode, tokens(5, 5), 3)
    choice.on_ended(decode, Ended(KEY, "cancelled"))
    assert (heard.terminals, heard.closes, choice.late) == (1, 1, 1)


def test_an_end_at_the_first_token_releases_decode() -> None:
    choice, heard, prefill, decode = begun()
    choice.on_tokens(prefill, tokens(0, 0), 1)
    choice.on_ended(prefill, Ended(KEY, "stop", stop_id=0))
    assert isinstance(sent(decode.session)[-1], Cancel)
    choice.on_ended(decode, Ended(KEY, "cancelled", code="Cancelled", message="x"))
    assert choice.terminal is not None
    assert (choice.terminal.reason, heard.closes) == ("stop", 1)


CANCELLED = Ended(KEY, "cancelled", code="Cancelled", message="Nothing will come.")


def test_an_end_at_the_first_token_may_be_told_by_decode_first() -> None:
    """Prefill tells decode over the link; decode's word on its own session may overtake prefill's."""
    choice, heard, prefill, decode = begun()
    choice.on_granted(Granted(KEY, 0))
    choice.on_ended(decode, CANCELLED)
    assert choice.terminal is None
    choice.on_tokens(prefill, tokens(0, 0), 1)
    choice.on_ended(prefill, Ended(KEY, "stop", stop_id=0))
    assert choice.terminal is not None
    assert (choice.terminal.reason, heard.text, heard.closes) == ("stop", "A", 1)


@pytest.mark.parametrize("reason", ["handed", "cancelled", "lost"])
def test_a_cancelled_decode_is_the_end_when_prefill_has_no_other(reason: str) -> None:
    choice, heard, prefill, decode = begun()
    choice.on_granted(Granted(KEY, 0))
    choice.on_ended(decode, CANCELLED)
    if reason == "lost":
        choice.on_lost(prefill, WorkerLost("gone."))
    else:
        choice.on_ended(prefill, Ended(KEY, reason))  # type: ignore[arg-type]
    assert choice.terminal is not None
    assert type(choice.terminal.error) is (PrefillLost if reason == "lost" else Cancelled)
    assert (heard.terminals, heard.closes) == (1, 1)


def test_a_decode_that_is_cancelled_before_its_grant_is_the_end() -> None:
    """Prefill has not begun, so nothing of it can explain that."""
    choice, _heard, prefill, decode = begun()
    choice.on_ended(decode, CANCELLED)
    assert isinstance(choice.terminal and choice.terminal.error, Cancelled)
    assert isinstance(sent(prefill.session)[-1], Cancel)


def test_decode_that_prefills_itself_releases_prefill() -> None:
    choice, heard, prefill, decode = begun()
    choice.on_granted(Granted(KEY, 16, local=True))
    assert isinstance(sent(prefill.session)[-1], Cancel)
    choice.on_ended(prefill, Ended(KEY, "cancelled"))
    choice.on_tokens(decode, tokens(0, 0, 1), 1)
    choice.on_ended(decode, Ended(KEY, "length", cached=16))
    assert (heard.text, heard.terminals, heard.closes, choice.cached) == ("AB", 1, 1, 16)


def test_a_grant_that_is_taken_back() -> None:
    """Prefill's token has come already; decode draws it again, and it counts once."""
    choice, heard, prefill, decode = begun()
    choice.on_granted(Granted(KEY, 0))
    choice.on_tokens(prefill, tokens(0, 0), 1)
    choice.on_granted(Granted(KEY, 0, local=True))
    choice.on_ended(prefill, Ended(KEY, "cancelled"))
    choice.on_tokens(decode, tokens(0, 0, 1, 2), 1)
    choice.on_ended(decode, Ended(KEY, "length"))
    assert (heard.ids, heard.terminals, heard.closes) == ([0, 1, 2], 1, 1)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_error_of_one_side_ends_the_other(side: str) -> None:
    choice, heard, prefill, decode = begun()
    failing, other = (prefill, decode) if side == "prefill" else (decode, prefill)
    choice.on_ended(failing, Ended(KEY, "error", code="TransferFailed", message="broken"))
    assert choice.terminal is not None
    assert isinstance(choice.terminal.error, TransferFailed)
    assert isinstance(sent(other.session)[-1], Cancel)
    assert heard.closes == 0
    choice.on_ended(other, Ended(KEY, "cancelled"))
    assert heard.closes == 1


@pytest.mark.parametrize(("side", "kind"), [("prefill", PrefillLost), ("decode", DecodeLost)])
def test_a_lost_worker_is_a_typed_error(side: str, kind: type[WorkerLost]) -> None:
    choice, heard, prefill, decode = begun()
    choice.on_tokens(prefill, tokens(0, 0), 1)
    lost, other = (prefill, decode) if side == "prefill" else (decode, prefill)
    choice.on_lost(lost, WorkerLost("its stream broke."))
    assert choice.terminal is not None
    assert type(choice.terminal.error) is kind
    assert isinstance(sent(other.session)[-1], Cancel)
    choice.on_lost(other, WorkerLost("its stream broke, too."))
    assert (heard.terminals, heard.closes) == (1, 1)


def test_prefill_may_die_when_decode_has_begun() -> None:
    choice, heard, prefill, decode = begun()
    choice.on_tokens(prefill, tokens(0, 0), 1)
    choice.on_tokens(decode, tokens(1, 1), 2)
    choice.on_lost(prefill, WorkerLost("gone."))
    assert choice.terminal is None
    choice.on_ended(decode, Ended(KEY, "length"))
    assert (heard.text, heard.closes) == ("AB", 1)


def test_the_first_terminal_event_counts() -> None:
    choice, heard, prefill, decode = begun()
    assert choice.fail(Cancelled("The client left."))
    assert not choice.fail(DecodeLost("later"))
    choice.on_granted(Granted(KEY, 0))
    choice.on_ended(prefill, Ended(KEY, "error", code="Internal", message="later"))
    choice.on_ended(decode, Ended(KEY, "length"))
    choice.on_ended(decode, Ended(KEY, "length"))
    assert choice.terminal is not None
    assert (choice.terminal.reason, heard.terminals, heard.closes) == ("cancelled", 1, 1)
