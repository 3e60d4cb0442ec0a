"""What a load consists of: lengths, files of prompts, and the public traces."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path

import pytest

from diptych.bench.workload import Tokens, from_lengths, from_prompts, from_trace, poisson, recorded, taken
from diptych.contract.errors import ConfigInvalid

TRACES = Path(__file__).parents[2].parent / "shared" / "workloads"
needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not in ../shared/workloads")


def tokens(seed: int = 0) -> Tokens:
    return Tokens(1000, seed)


def test_lengths_turns_and_seeds() -> None:
    chats = list(from_lengths("10-20x3", 2, 50, tokens()))
    assert len(chats) == 50
    sizes = {len(turn.tokens) for chat in chats for turn in chat.turns}
    assert sizes <= set(range(10, 21))
    assert len(sizes) > 5
    assert all(len(chat.turns) == 2 and chat.turns[0].new == 3 for chat in chats)
    assert all(100 <= token < 1000 for chat in chats for turn in chat.turns for token in turn.tokens)
    assert chats == list(from_lengths("10-20x3", 2, 50, tokens()))
    assert chats != list(from_lengths("10-20x3", 2, 50, tokens(1)))


@pytest.mark.parametrize("spec", ["10", "x", "0x4", "20-10x4", "10x4x4", "axb"])
def test_lengths_that_are_none(spec: str) -> None:
    with pytest.raises(ConfigInvalid, match="PROMPTxNEW"):
        list(from_lengths(spec, 1, 1, tokens()))


def test_prompts_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Hello", "max_tokens": 4}\n\n{"tokens": [5, 6], "max_tokens": 2}\n')
    first, second = from_prompts(file)
    assert (first.turns[0].text, first.turns[0].new) == ("Hello", 4)
    assert (second.turns[0].tokens, second.turns[0].text) == ((5, 6), None)


@pytest.mark.parametrize(
    "line", ["{", "3", '{"prompt": "x"}', '{"prompt": "", "max_tokens": 3}', '{"tokens": ["a"], "max_tokens": 3}']
)
def test_a_broken_line_of_prompts_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "Hello", "max_tokens": 4}\n' + line + "\n")
    with pytest.raises(ConfigInvalid, match=r"p\.jsonl:2"):
        list(from_prompts(file))


def test_azures_format(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:04.4799600,30,8\n"
    )
    first, second = from_trace(file, tokens())
    assert (len(first.turns[0].tokens), first.turns[0].new, first.at) == (48, 10, 0.0)
    assert second.at == pytest.approx(0.5)
    assert len(next(from_trace(file, tokens(), shrink=4.0)).turns[0].tokens) == 12


def test_mooncakes_shared_prefixes(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 2500, "input_length": 1300, "output_length": 7, "hash_ids": [0, 1, 3]},
        {"timestamp": 2600, "input_length": 600, "output_length": 7, "hash_ids": [4, 1]},
    ]
    file = tmp_path / "mooncake.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    first, second, third = from_trace(file, tokens())
    a, b, c = (chat.turns[0].tokens for chat in (first, second, third))
    assert (len(a), len(b), len(c)) == (1100, 1300, 600)
    assert a[:1024] == b[:1024]
    assert a[1024:] != b[1024:1100]
    assert c[:512] != a[:512]
    assert second.at == 2.5


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,48\n",
        "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,48,3\n",
        '{"timestamp": 0, "input_length": 11, "output_length": 5, "hash_ids": [0]}\n{"timestamp": 0}\n',
        '{"timestamp": 0, "input_length": 11, "output_length": 5, "hash_ids": [0]}\n{"timest\n',
    ],
)
def test_a_broken_line_of_a_trace_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "t"
    file.write_text(text)
    with pytest.raises(ConfigInvalid, match="t:2 is broken"):
        list(from_trace(file, tokens()))


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("hello\n")
    with pytest.raises(ConfigInvalid, match="neither an Azure trace"):
        from_trace(tmp_path / "t", tokens())
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        from_trace(tmp_path / "none", tokens())


@needs_traces
def test_the_public_traces() -> None:
    azure = list(islice(from_trace(TRACES / "AzureLLMInferenceTrace_code.csv", tokens()), 200))
    assert (len(azure[0].turns[0].tokens), azure[0].turns[0].new) == (4808, 10)
    assert all(a.at <= b.at for a, b in pairwise(azure))
    first, second = islice(from_trace(TRACES / "mooncake_conversation_trace.jsonl", tokens()), 2)
    assert first.turns[0].tokens[:512] == second.turns[0].tokens[:512]  # hash id 0 opens both
    assert first.turns[0].tokens[512:1024] != second.turns[0].tokens[512:1024]
    assert len(second.turns[0].tokens) == 7322


def test_what_does_not_fit_is_left_out() -> None:
    chats, left_out = taken(from_lengths("10-20x3", 1, 50, tokens()), 50, limit=18)
    assert left_out
    assert len(chats) + left_out == 50
    assert all(chat.longest <= 18 for chat in chats)
    with pytest.raises(ConfigInvalid, match="context of 5"):
        taken(from_lengths("10x3", 1, 5, tokens()), 5, limit=5)


def test_arrivals() -> None:
    chats = list(from_lengths("1x1", 1, 4000, tokens()))
    times = poisson(50.0, seed=3)(chats)
    assert times == sorted(times)
    assert len(chats) / times[-1] == pytest.approx(50.0, rel=0.1)
    assert poisson(50.0, seed=3)(chats) == times
    late = [type(chat)(chat.turns, at) for chat, at in zip(chats[:3], (10.0, 11.0, 14.0), strict=True)]
    assert recorded(2.0)(late) == [0.0, 0.5, 2.0]
