"""A client's message → what it asks for, every parameter checked. Nothing goes on from here that a worker could choke
on.

Owns the bounds of every field and the sentences that refuse. Knows the protocol and the model's facts; tokenises
nothing (`prepare` does) and sends nothing.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable

import msgspec
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from diptych.contract.errors import CapacityExceeded, InvalidRequest
from diptych.contract.request import Sampling, Stopping
from diptych.router.facts import ModelFacts
from diptych.v1 import inference_pb2 as pb

MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_SALT = 256
MAX_COUNT = 2**31 - 1
MAX_SEED = 2**63 - 1


class Room(msgspec.Struct, frozen=True):
    """How many tokens, prompt and answer together, fit into the context, and into the cache of a worker that decodes;
    prompt: how many of the prompt fit into the cache of one that prefills."""

    context: int
    cache: int
    prompt: int

    @property
    def tokens(self) -> int:
        return min(self.context, self.cache)


class Order(msgspec.Struct, frozen=True):
    """A checked request, without its prompt. max_tokens, min_tokens: as asked; `stopping` fits them to the prompt."""

    sampling: Sampling
    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    n: int
    echo: bool
    logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool
    salt: str


def parse(data: bytes, kind: type[Message], limit: int) -> Message:
    """One message of the protocol, all of whose fields we know. Raises `InvalidRequest`."""
    if len(data) > limit:
        raise InvalidRequest(f"The message has {len(data)} bytes; at most {limit} are taken. Send a shorter prompt.")
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        name = kind.DESCRIPTOR.full_name
        raise InvalidRequest(f"The message is no valid {name}: malformed, or with a text that is not UTF-8.") from None
    _refuse_unknown(message, "")
    return message


def order(request: pb.GenerateRequest, facts: ModelFacts, max_choices: int) -> Order:
    """Raises `InvalidRequest` naming the first field that is wrong."""
    if request.HasField("model") and request.model != facts.name:
        raise InvalidRequest(f"model {request.model!r} is not served here; {facts.name!r} is.")
    stopping, response = request.stopping, request.response
    max_tokens = _whole(stopping, "stopping", "max_tokens", 1, MAX_COUNT)
    min_tokens = _whole(stopping, "stopping", "min_tokens", 0, MAX_COUNT) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(f"stopping.min_tokens ({min_tokens}) must not exceed stopping.max_tokens ({max_tokens}).")
    return Order(
        sampling=_sampling(request.sampling, facts),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=_stops(stopping.stop),
        stop_ids=_stop_ids(stopping.stop_token_ids, facts),
        ignore_eos=stopping.ignore_eos,
        n=_whole(response, "response", "n", 1, max_choices) or 1,
        echo=response.echo,
        logprobs=_whole(response, "response", "logprobs", 0, MAX_LOGPROBS),
        prompt_logprobs=_whole(response, "response", "prompt_logprobs", 0, MAX_LOGPROBS),
        token_ids=response.token_ids,
        salt=_salt(request),
    )


def check_text_ids(ids: tuple[int, ...], kind: str, facts: ModelFacts, name: Callable[[int], str]) -> tuple[int, ...]:
    """A prompt that was tokenised from `kind`: a tokenizer may know added tokens for which the model has no row."""
    for token in ids:
        if not 0 <= token < facts.vocabulary:
            raise InvalidRequest(f"{kind} holds {name(token)!r}, token {token}, outside {_span(facts)}.")
    return ids


def check_ids(ids: Iterable[int], facts: ModelFacts) -> tuple[int, ...]:
    """A prompt given as ids."""
    checked = tuple(ids)
    for index, token in enumerate(checked):
        if not 0 <= token < facts.vocabulary:
            raise InvalidRequest(f"token_ids.ids[{index}] is {token}, outside {_span(facts)}.")
    return checked


def stopping(asked: Order, prompt_tokens: int, facts: ModelFacts, room: Room) -> Stopping:
    """The limits of one choice, fitted to the prompt; without max_tokens it may use what is left of the room.

    Raises `InvalidRequest` when the context cannot hold it, `CapacityExceeded` when no worker's cache can."""
    if prompt_tokens < 1:
        raise InvalidRequest("The prompt is empty; at least one token is needed.")
    if prompt_tokens >= room.context:
        raise InvalidRequest(
            f"The prompt has {prompt_tokens} tokens; the context of {room.context} takes at most {room.context - 1}."
        )
    if asked.max_tokens is not None and prompt_tokens + asked.max_tokens > room.context:
        raise InvalidRequest(
            f"stopping.max_tokens is {asked.max_tokens} and the prompt has {prompt_tokens} tokens; the context of "
            f"{room.context} leaves at most {room.context - prompt_tokens}."
        )
    needed = prompt_tokens + (asked.max_tokens or max(1, asked.min_tokens))
    if needed > room.cache:
        raise CapacityExceeded(f"The request needs room for {needed} tokens; a worker's cache has {room.cache}.")
    if prompt_tokens > room.prompt:
        raise CapacityExceeded(f"The prompt needs room for {prompt_tokens} tokens; a worker's cache has {room.prompt}.")
    if asked.max_tokens is None and asked.min_tokens > room.tokens - prompt_tokens:
        raise InvalidRequest(
            f"stopping.min_tokens is {asked.min_tokens}; the context leaves {room.tokens - prompt_tokens} tokens."
        )
    return Stopping(
        max_tokens=asked.max_tokens or room.tokens - prompt_tokens,
        min_tokens=asked.min_tokens,
        end_ids=facts.end_ids,
        stop_ids=asked.stop_ids,
        ignore_eos=asked.ignore_eos,
    )


def _sampling(asked: pb.Sampling, facts: ModelFacts) -> Sampling:
    seed = _whole(asked, "sampling", "seed", 0, MAX_SEED)
    return Sampling(
        temperature=_number(asked, "temperature", 0, 100, 1.0),
        top_p=_number(asked, "top_p", 0, 1, 1.0, above=True),
        top_k=_whole(asked, "sampling", "top_k", 0, MAX_COUNT) or 0,
        min_p=_number(asked, "min_p", 0, 1, 0.0),
        seed=secrets.randbits(63) if seed is None else seed,
        repetition_penalty=_number(asked, "repetition_penalty", 0, 10, 1.0, above=True),
        presence_penalty=_number(asked, "presence_penalty", -2, 2, 0.0),
        frequency_penalty=_number(asked, "frequency_penalty", -2, 2, 0.0),
        logit_bias=_bias(asked, facts),
    )


def _number(asked: pb.Sampling, field: str, low: float, high: float, default: float, above: bool = False) -> float:
    if not asked.HasField(field):
        return default
    value = float(getattr(asked, field))
    if not math.isfinite(value) or not low <= value <= high or (above and value == low):
        least = f"above {low}" if above else f"at least {low}"
        raise InvalidRequest(f"sampling.{field} is {value}; it must be {least} and at most {high}.")
    return value


def _whole(asked: Message, where: str, field: str, low: int, high: int) -> int | None:
    if not asked.HasField(field):
        return None
    value = int(getattr(asked, field))
    if not low <= value <= high:
        raise InvalidRequest(f"{where}.{field} is {value}; it must be from {low} to {high}.")
    return value


def _bias(asked: pb.Sampling, facts: ModelFacts) -> tuple[tuple[int, float], ...]:
    if len(asked.logit_bias) > MAX_BIASES:
        raise InvalidRequest(f"sampling.logit_bias has {len(asked.logit_bias)} entries; at most {MAX_BIASES} go.")
    for token, value in asked.logit_bias.items():
        if not 0 <= token < facts.vocabulary:
            raise InvalidRequest(f"sampling.logit_bias[{token}] is outside {_span(facts)}.")
        if not -100 <= value <= 100:
            raise InvalidRequest(f"sampling.logit_bias[{token}] is {value}; it must be from -100 to 100.")
    return tuple(sorted(asked.logit_bias.items()))


def _stops(stops: Iterable[str]) -> tuple[str, ...]:
    checked = tuple(dict.fromkeys(stops))
    if len(checked) > MAX_STOPS:
        raise InvalidRequest(f"stopping.stop has {len(checked)} strings; at most {MAX_STOPS} are taken.")
    for index, stop in enumerate(checked):
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(f"stopping.stop[{index}] has {len(stop)} characters; 1 to {MAX_STOP_LENGTH} go.")
    return checked


def _stop_ids(ids: Iterable[int], facts: ModelFacts) -> tuple[int, ...]:
    checked = tuple(dict.fromkeys(ids))
    if len(checked) > MAX_STOP_IDS:
        raise InvalidRequest(f"stopping.stop_token_ids has {len(checked)} ids; at most {MAX_STOP_IDS} are taken.")
    for token in checked:
        if not 0 <= token < facts.vocabulary:
            raise InvalidRequest(f"stopping.stop_token_ids holds {token}, outside {_span(facts)}.")
    return checked


def _span(facts: ModelFacts) -> str:
    return f"the vocabulary (0 to {facts.vocabulary - 1})"


def _salt(request: pb.GenerateRequest) -> str:
    if len(request.cache_salt) > MAX_SALT:
        raise InvalidRequest(f"cache_salt has {len(request.cache_salt)} characters; at most {MAX_SALT} are taken.")
    return request.cache_salt


def _refuse_unknown(message: Message, where: str) -> None:
    """A field that we do not know may change what is meant: refused, never ignored."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        place = where.rstrip(".") or message.DESCRIPTOR.name
        raise InvalidRequest(f"{place} holds field number {unknown[0].field_number}, which this server does not know.")
    for field, value in message.ListFields():
        kind = field.message_type
        if kind is None or kind.GetOptions().map_entry:
            continue
        for item in value if field.is_repeated else (value,):
            _refuse_unknown(item, f"{where}{field.name}.")
