"""Tokens to text: nothing half, nothing twice, the same streamed and whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from diptych.contract.request import Stopping
from diptych.router.detokenizer import Detokenizer
from diptych.router.text import TextStream
from diptych.router.tokenizer import Tokenizer

IDS = st.lists(st.integers(0, 49_151) | st.integers(0, 400), max_size=30)


def pieces(tokenizer: Tokenizer, ids: list[int], opened: bytes = b"") -> list[str]:
    detokenizer = Detokenizer(tokenizer.pieces, opened)
    return [*(detokenizer.push(token) for token in ids), detokenizer.finish()]


@given(ids=IDS)
@settings(deadline=None)
def test_streamed_is_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    whole = b"".join(tokenizer.pieces[token] for token in ids).decode("utf-8", "replace")
    assert "".join(pieces(tokenizer, ids)) == whole
    assert tokenizer.source.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == whole


@given(text=st.text(max_size=40))
@settings(deadline=None)
def test_text_comes_back_without_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    ids = list(tokenizer.encode(text))
    streamed = pieces(tokenizer, ids)
    if b"".join(tokenizer.pieces[token] for token in ids) == text.encode():  # this vocabulary lacks a few bytes
        assert "".join(streamed) == text
        assert sum(piece.count("\ufffd") for piece in streamed) == text.count("\ufffd")


def test_pieces_with_byte_fallback() -> None:
    """The other kind of tokenizer: ▁ for a space, and a token a byte for what has no piece."""
    vocabulary = {"<unk>": 0, "</s>": 1, "▁Hi": 2, "▁": 3, "!": 4} | {
        f"<0x{byte:02X}>": 5 + byte for byte in range(256)
    }
    backend = Backend(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"))
    wave = [5 + byte for byte in "👋".encode()]
    assert pieces(made, [2, 3, *wave, 1, 4]) == [" Hi", " ", "", "", "", "👋", "", "!", ""]
    assert made.token_text(1) == "</s>"


def test_a_prompt_that_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    opened = tokenizer.open_bytes([19556, 905, 15107, 230])
    ids = [231, 10813, 230, 226, 10813, 230, 231]
    assert "".join(pieces(tokenizer, ids, opened)) == "🌍🌈🌍"
    assert pieces(tokenizer, ids[:6], opened) == ["🌍", "", "", "🌈", "", "", "\ufffd"]
    assert pieces(tokenizer, [], opened) == [""], "nothing was generated, so nothing is shown"
    assert tokenizer.open_bytes([19556, 905]) == b""


@given(ids=IDS, stops=st.lists(st.text(" aeinrst.", min_size=1, max_size=3), max_size=3), least=st.integers(0, 8))
@settings(deadline=None)
def test_a_choice_is_the_same_in_any_portions(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], least: int
) -> None:
    def run(portion: int) -> tuple[str, int, str | None]:
        stopping = Stopping(100, min_tokens=least, end_ids=(2,), stop_ids=(30,))
        stream = TextStream(Detokenizer(tokenizer.pieces), stopping, stops)
        text, used = "", 0
        for start in range(0, len(ids), portion):
            delta = stream.push(ids[start : start + portion])
            text, used = text + delta.text, used + delta.used
            if delta.stop is not None:
                return text, used, delta.stop
        rest = stream.finish()
        return text + rest.text, used, rest.stop

    assert run(1) == run(3) == run(1000)
