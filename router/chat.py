"""A conversation → prompt tokens, through the model's chat template.

Owns the promise that no text of a message becomes a control token. The template is rendered from the messages as
they are (so that one which trims, splits or looks at them does its work), except that every control token typed by a
user is broken by a mark. In the rendered text only the template's own control tokens are whole: they are exchanged for
aliases that nobody can type, the marks are taken out, and a copy of the tokenizer that knows the aliases alone encodes
it all in one pass, exactly as the original would encode a text without forgeries.

Marks and aliases are private-use characters around 64 random bits, new with every process.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend

from diptych.contract.errors import InvalidRequest
from diptych.router.conversation import Conversation
from diptych.router.tokenizer import Tokenizer, must_be_text

_DIGITS = "".join(chr(0xE100 + value) for value in range(16))


def _unforgeable() -> str:
    return "".join(_DIGITS[int(digit, 16)] for digit in secrets.token_hex(8))


class ChatTemplate:
    """Immutable after construction; `encode` may run in several threads at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._source = tokenizer.source
        self._mark, self._end = f"\ue000{_unforgeable()}\ue001", f"\ue002{_unforgeable()}\ue003"
        self._added = {text: index for text, index in tokenizer.added.items() if not text.isspace()}
        self._danger = _Danger(self._added)
        self._danger_from_model = _Danger(tokenizer.controls)
        self._aliases = {text: f"\ue004{_unforgeable()}{chr(0xE200 + rank)}" for rank, text in enumerate(self._added)}
        self._encoder = Backend.from_str(json.dumps(self._renamed(tokenizer.state)))
        vocabulary = self._encoder.get_vocab()
        self._ids = {vocabulary[alias]: self._added[text] for text, alias in self._aliases.items()}

    @property
    def exists(self) -> bool:
        return bool(self._source.chat_template)

    def encode(self, talk: Conversation) -> tuple[tuple[int, ...], str]:
        """(prompt ids, the text that they stand for). Raises `InvalidRequest` when the template refuses."""
        rendered = self._render(self._guarded(talk))
        if talk.continued:
            rendered = self._cut(rendered)
        rendered = self._danger.whole.sub(lambda found: self._aliases[found[0]], rendered)
        plain = must_be_text("chat", rendered.replace(self._mark, ""))
        ids = self._encoder.encode(plain, add_special_tokens=False).ids
        shown = plain
        for text, alias in self._aliases.items():
            shown = shown.replace(alias, text)
        return tuple(self._ids.get(index, index) for index in ids), shown

    def _guarded(self, talk: Conversation) -> Conversation:
        """Assistant's messages keep tokens such as <think>: they are the model's own words, come back as text."""
        messages = [dict(message) for message in talk.messages]
        for message in messages:
            danger = self._danger_from_model if message["role"] == "assistant" else self._danger
            message |= {field: self._broken(value, danger) for field, value in message.items() if field != "role"}
        if talk.continued:
            messages[-1]["content"] += self._end
        tools = tuple(self._broken(tool, self._danger) for tool in talk.tools)
        return Conversation(tuple(messages), tools, talk.open_turn, talk.continued)

    def _broken(self, value: Any, danger: _Danger) -> Any:
        """`value` with a mark behind the first character of everything that is, or at its end may become, a danger."""
        if isinstance(value, dict):
            return {self._broken(key, danger): self._broken(item, danger) for key, item in value.items()}
        if isinstance(value, list):
            return [self._broken(item, danger) for item in value]
        if not isinstance(value, str):
            return value
        value = danger.whole.sub(lambda found: found[0][0] + self._mark + found[0][1:], value)
        for length in range(1, min(danger.longest, len(value) + 1)):
            cut = len(value) - length
            if value[cut:] in danger.beginnings:
                return value[: cut + 1] + self._mark + value[cut + 1 :]
        return value

    def _render(self, talk: Conversation) -> str:
        if not self.exists:
            raise InvalidRequest("chat is not possible: the model has no chat template. Send text or token_ids.")
        try:
            text = self._source.apply_chat_template(
                list(talk.messages),
                tools=list(talk.tools) or None,
                add_generation_prompt=talk.open_turn,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequest(f"chat does not fit the model's template: {' '.join(str(error).split())}.") from None
        return str(text)

    def _cut(self, rendered: str) -> str:
        """Everything before the end of the last message: white space there is kept, since the mark follows it."""
        before, found, _ = rendered.rpartition(self._end)
        if not found:
            raise InvalidRequest("chat.continue_final_message: the model's template does not show the last message.")
        return before

    def _renamed(self, state: dict[str, Any]) -> dict[str, Any]:
        """The tokenizer with an alias in the place of every added token; ids of aliases are new ones."""
        texts = ((token, token["content"]) for token in state["added_tokens"])
        tokens = [token | {"content": self._aliases.get(text, text)} for token, text in texts]
        return state | {"added_tokens": tokens, "post_processor": None}


class _Danger:
    """Tokens that a text must not spell, and their beginnings: the next text may add what completes them."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted(tokens, key=len, reverse=True)
        self.whole = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.beginnings = {token[:length] for token in longest_first for length in range(1, len(token))}
        self.longest = len(longest_first[0]) if longest_first else 0
