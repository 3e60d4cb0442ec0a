"""The frozen request: all that a client may set, after validation, in tokens.

Made by the router alone, read by workers; text, templates and stop strings never leave the router.
"""

from __future__ import annotations

import msgspec


class Key(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Names one attempt of one request on every message. A message of an older attempt is answered and dropped."""

    request: str
    attempt: int = 0


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a token is drawn. Randomness is a function of (seed, position) only: never of neighbours or of a worker.

    temperature: 0 is greedy, and so is anything below 1e-5, where dividing would overflow.
    top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    seed: [0, 2**63); the router draws one when the client gave none, so a worker never does.
    repetition_penalty counts prompt and output, presence and frequency count output only (as OpenAI defines them).
    logit_bias: (token id, bias) pairs, ids validated against the vocabulary by the router.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


class Stopping(msgspec.Struct, frozen=True, omit_defaults=True):
    """When generation ends, in tokens. Stop strings are matched by the router, which then cancels.

    end_ids: the model's own end tokens, ignored under `ignore_eos`; stop_ids: the client's. Neither may be drawn
    while fewer than `min_tokens` tokens were generated (their logits are masked). The token that ends a stream is
    reported and counted.
    """

    max_tokens: int
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def stops(self) -> frozenset[int]:
        """Ids that end this request."""
        return frozenset(self.stop_ids if self.ignore_eos else self.stop_ids + self.end_ids)


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence to generate. A client's `n` > 1 becomes n requests, each with its own key and seed.

    prompt: token ids, at least one. deadline_s: time left when the message was sent, counted from its arrival on the
    receiver's monotonic clock. logprobs / prompt_logprobs: None is off, else the number of alternatives (0 to 20);
    positions of the prompt after the first get an entry each. salt: keeps a tenant's prefix cache apart from others'.
    traceparent: W3C header of the root span, so that every process can name its trace.
    """

    key: Key
    prompt: tuple[int, ...]
    stopping: Stopping
    sampling: Sampling = Sampling()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    deadline_s: float = 600.0
    salt: str = ""
    session: str = ""
    traceparent: str = ""
