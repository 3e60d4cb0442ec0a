"""Messages between router, front and engine: tagged structs, packed with msgpack, one definition for every hop.

    router ──Reserve, Prefill, Start, Generate, Cancel──▶ front ──the same bytes──▶ engine
    router ◀──Granted, Step, Ended, Load──────────────── front ◀────────────────── engine

The order of a session's messages is kept in both directions. Every message about a request carries its `Key`; one
that names an unknown or older attempt is dropped by its receiver. All of them may be repeated without harm.

The life of one request's part at a worker, each ending in exactly one `Ended`:

    decode:    Reserve ─▶ (waits for blocks) ─▶ Granted ─▶ KV arrives ─▶ Step … ─▶ Ended(stop | length)
    prefill:   Prefill ─▶ (waits for Start, then for its turn) ─▶ Step (first token) ─▶ Ended(handed | stop | length)
    colocated: Generate ─▶ Step … ─▶ Ended(stop | length)
    any:       ─▶ Ended(cancelled | error)
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from diptych.contract.request import Key, Request

PROTOCOL = 3
"""Raised with every incompatible change; a session whose ends differ is refused with `LayoutMismatch`."""

Role = Literal["prefill", "decode", "colocated"]


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """One closed interval of one request in one process.

    start, end: ns on that process's monotonic clock. `attributes` holds what the stage explains: the cause of a wait,
    tokens of a chunk, bytes of a transfer. Stages of one chain share their borders: one's end is the next one's start.
    """

    name: str
    start: int
    end: int
    attributes: dict[str, Any] = {}


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """The drawn token's log-probability under the model's own distribution (before temperature, bias and penalties),
    and the best alternatives, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenOut(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one sequence from one step. position: index of the first of them among the generated tokens (0 is
    prefill's). logprobs: one an id when asked for, else empty."""

    key: Key
    position: int
    ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()


# router → worker


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Asks a decode worker for blocks. `prefill` is the worker whose link will carry the KV."""

    request: Request
    prefill: str


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Queues a prompt at a prefill worker. With `decode` set it starts at `Start` and hands over to that worker;
    with None (nothing will be decoded) it starts at its turn and ends with its first token."""

    request: Request
    decode: str | None


class Start(msgspec.Struct, frozen=True, tag=True):
    """Passes a grant on: decode holds the first `held` prompt tokens already and waits for the rest at `data_rank`."""

    key: Key
    held: int
    data_rank: int = 0


class Generate(msgspec.Struct, frozen=True, tag=True):
    """The whole request on this one worker."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Ends whatever this worker does for the key. May overtake what it cancels: the worker remembers it a while."""

    key: Key
    reason: str = "cancelled"


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A router's heartbeat, every `limits.heartbeat`: a session that brings nothing for `limits.lease` is broken. A
    router that is stopped rather than dead keeps its connection open, and would else hold its requests for ever."""


# worker → router


class Granted(msgspec.Struct, frozen=True, tag=True):
    """Decode has reserved blocks for the prompt plus one. held: prompt tokens whose KV it holds already (a multiple of
    the block size). local: it lacks so little that it prefills the rest itself; no prefill worker is needed. data_rank:
    where the blocks are."""

    key: Key
    held: int
    local: bool = False
    data_rank: int = 0


class Step(msgspec.Struct, frozen=True, tag=True):
    """All tokens of one engine step for one router. drawn: when they were on the host, ns of the engine's clock."""

    tokens: tuple[TokenOut, ...]
    drawn: int = 0


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The one terminal message of a request's part at this worker.

    reason: stop | length | handed | cancelled | error. code, message: of the error tree, for `error` and `cancelled`.
    generated: tokens that this worker drew. cached: prompt tokens found in its prefix cache. prompt_logprobs: for
    positions 1 … of the prompt, when asked for. stop_id: the token that ended it, for `stop`.
    """

    key: Key
    reason: Literal["stop", "length", "handed", "cancelled", "error"]
    generated: int = 0
    cached: int = 0
    stop_id: int | None = None
    code: str = ""
    message: str = ""
    prompt_logprobs: tuple[Logprob, ...] = ()
    stages: tuple[Stage, ...] = ()


class Load(msgspec.Struct, frozen=True, tag=True):
    """A worker's heartbeat and load, every `limits.heartbeat` on each session, idle or not.

    clock: (monotonic, wall) in ns at sending. links: ids of the prefill workers (at decode) or decode workers (at
    prefill) to which a link is ready. prefixes: digests of cached prefix blocks gained and lost since the last message
    of the session (bounded; the router keeps a hint, never a promise). experts: tokens that each expert was given
    since the start, where experts are spread over ranks. softmax_rows: rows of decode attention that left the unified
    maximum's window and were computed again, and all of them, since the start.
    """

    clock: tuple[int, int]
    running: int = 0
    waiting: int = 0
    reserved: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    cached_blocks: int = 0
    step_ms: float = 0.0
    generated_total: int = 0
    links: tuple[str, ...] = ()
    gained: tuple[bytes, ...] = ()
    lost: tuple[bytes, ...] = ()
    draining: bool = False
    experts: tuple[int, ...] = ()
    softmax_rows: tuple[int, int] = (0, 0)


# the session's opening, both directions: a mutual challenge before anything else


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a router. The worker answers `Challenge`, the router `Proof`, the worker `Welcome`."""

    router: str
    session: str
    nonce: bytes
    protocol: int = PROTOCOL


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """nonce: the worker's. proof: HMAC of (`worker`, both nonces, epoch) under the service's secret."""

    nonce: bytes
    proof: bytes
    epoch: str


class Proof(msgspec.Struct, frozen=True, tag=True):
    """proof: HMAC of (`router`, both nonces, epoch)."""

    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The session is open. worker: the entry as registered; clock as in `Load`."""

    worker: WorkerInfo
    clock: tuple[int, int]


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker group's entry in the registry.

    id: `epoch`'s short name, unique for the group's life: role, index and epoch. address: host:port of the front's
    internal gRPC. links: host:port of each rank's link listener, the first engine's first. data: how many data ranks
    share them out, neighbours together. total_blocks: of one data rank, so the most that a request may hold. epoch: 16
    hex digits, new with every start. digest: of all that prefill and decode must agree on (model, dtype, block size,
    layout); two workers with different digests are never paired.
    """

    id: str
    role: Role
    address: str
    links: tuple[str, ...]
    epoch: str
    digest: str
    pid: int
    engine_pids: tuple[int, ...]
    block_size: int
    total_blocks: int
    max_context: int
    revision: str = ""
    transport: str = "gloo"
    device: str = "cpu"
    data: int = 1


ToWorker = Hello | Proof | Beat | Reserve | Prefill | Start | Generate | Cancel
ToRouter = Challenge | Welcome | Granted | Step | Ended | Load

_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
to_router = msgspec.msgpack.Decoder(ToRouter)


def pack(message: msgspec.Struct) -> bytes:
    """One message as bytes. Read it with `to_worker.decode` or `to_router.decode`."""
    return _encoder.encode(message)


BEAT = pack(Beat())


def hello_proof(
    secret: bytes, side: Literal["worker", "router"], router_nonce: bytes, worker_nonce: bytes, epoch: str
) -> bytes:
    """HMAC-SHA256 that proves to hold `secret`, bound to this side, both nonces and the group's epoch. Compare it with
    `hmac.compare_digest` only."""
    import hashlib
    import hmac

    text = b"|".join([b"diptych-session", side.encode(), router_nonce, worker_nonce, epoch.encode()])
    return hmac.new(secret, text, hashlib.sha256).digest()


SESSION_METHOD = "/diptych.internal.v1.Worker/Session"
"""Bidirectional gRPC stream of packed messages, opened by a router. It is the lease on all that the router holds
there: when it ends, the worker cancels the router's work on it, and the router counts the worker as lost."""
