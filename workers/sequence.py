"""One request's part at this engine: its tokens, its blocks, where it stands, and the stages it went through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic_ns
from typing import Any

from diptych.contract.prefix import extend_digests
from diptych.contract.request import Key, Request
from diptych.contract.wire import Logprob, Stage


class State(Enum):
    """
    prefill:   GRANT_WAIT ─▶ WAITING ─▶ RUNNING ─▶ SENDING ─▶ ENDED
    decode:    BLOCK_WAIT ─▶ RESERVED ─▶ RUNNING ─▶ ENDED           RUNNING ─▶ WAITING (preempted) ─▶ RUNNING
    colocated: WAITING ─▶ RUNNING ─▶ ENDED                           (and the same)
    Any state may go to ENDED.
    """

    GRANT_WAIT = "grant_wait"  # prefill: decode has not granted blocks yet
    BLOCK_WAIT = "block_wait"  # decode: waits for blocks of its own, first in, first out
    WAITING = "waiting"  # waits for its turn to be prefilled here
    RESERVED = "reserved"  # decode: holds blocks, the KV is on its way
    RUNNING = "running"  # in the batch
    SENDING = "sending"  # prefill: first token drawn, the KV is leaving
    ENDED = "ended"


@dataclass(eq=False)
class Sequence:
    """Owned by the engine's main thread; link threads see only snapshots made for them.

    tokens: prompt, then what was drawn. computed: tokens whose KV is in the cache once all launched steps are done.
    pending: tokens drawn by launched steps that are not committed yet. in_flight: launched steps that use its blocks.
    target: tokens to compute before one may be drawn (the prompt, or all known tokens after a preemption).
    """

    request: Request
    session: str
    block_size: int
    decode: str | None = None  # prefill: who receives
    prefill: str | None = None  # decode: who sends
    state: State = State.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    pending: int = 0
    in_flight: int = 0
    cached: int = 0
    held: int = 0
    published: int = 0
    sent: int = 0
    here: int = 0  # tokens drawn by this worker
    overtaken: int = 0
    stages: list[Stage] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    steps: int = 0
    batch_sum: int = 0
    hashed: bool = True  # whether its blocks' digests are wanted
    data_rank: int = 0  # where its blocks are, while it has any
    decode_rank: int = 0  # prefill: where decode's blocks are
    single: bool = False  # prefill: draws its first token here and no more

    def __post_init__(self) -> None:
        self.key: Key = self.request.key
        self.tokens: list[int] = list(self.request.prompt)
        self.prompt_len = len(self.tokens)
        self.arrived = monotonic_ns()
        self.mark = self.arrived
        self.deadline = self.arrived + int(self.request.deadline_s * 1e9)
        self.stops = self.request.stopping.stops
        self.target = self.prompt_len
        sampling = self.request.sampling
        self.needs_output = (
            sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        )
        self.digests: list[bytes] = []
        self.extend_digests()

    @property
    def length(self) -> int:
        """Tokens known or drawn."""
        return len(self.tokens) + self.pending

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def prefilling(self) -> bool:
        return self.computed < self.target

    @property
    def exhausted(self) -> bool:
        """True when the tokens drawn so far, committed or not, are all that it may draw."""
        return self.length - self.prompt_len >= self.request.stopping.max_tokens

    @property
    def full_length(self) -> int:
        """KV tokens that it can ever need here: the last token drawn is never computed."""
        return self.prompt_len + max(self.request.stopping.max_tokens - 1, 0)

    def close(self, name: str, now: int, **attributes: Any) -> None:
        """Closes the stage that ran since the last one was closed. Stages so share their borders."""
        self.stages.append(Stage(name, self.mark, now, attributes))
        self.mark = now

    def extend_digests(self) -> None:
        """Digests of blocks that generation has filled too, so that a follow-up turn finds them."""
        if self.hashed:
            extend_digests(self.digests, self.tokens, self.block_size, self.request.salt)

    def publish(self, publish: Callable[[int, bytes], None], upto: int) -> None:
        """Publishes blocks that are complete when `upto` tokens are computed."""
        if not self.hashed or upto // self.block_size <= self.published:
            return
        self.extend_digests()
        for index in range(self.published, upto // self.block_size):
            publish(self.blocks[index], self.digests[index])
        self.published = max(self.published, upto // self.block_size)
