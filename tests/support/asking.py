"""What tests of a running service ask and look at, over gRPC alone."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc

from diptych.router.client import ERROR_KEY, SERVICE, Client, ask
from diptych.v1 import inference_pb2 as pb

LIMIT = 60.0
PARIS = "The capital of France is"
PARIS_IDS = [504, 3575, 282, 4649, 314]
USUAL = " Paris.\n\nThe answer is: "
USUAL_IDS = [7042, 30, 198, 198, 504, 2988, 314, 42, 216]
STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
_salts = itertools.count()


def asks(prompt: str | Sequence[int] | None = PARIS, **options: Any) -> pb.GenerateRequest:
    """A greedy request that returns ids; options as `ask` takes them."""
    options.setdefault("temperature", 0.0)
    if isinstance(prompt, str):
        request = ask(prompt, **options)
    else:
        request = ask(token_ids=prompt, **options) if prompt is not None else ask(**options)
    request.response.token_ids = True
    return request


def fresh() -> str:
    """A salt of its own: nothing of this request is in any cache."""
    return f"salt-{next(_salts)}"


def ids(answer: pb.GenerateResponse, choice: int = 0) -> list[int]:
    return list(answer.choices[choice].token_ids)


async def pieces_of(client: Client, request: pb.GenerateRequest, **more: Any) -> list[pb.GenerateStreamResponse]:
    return [piece async for piece in client.stream(request, **{"timeout": LIMIT} | more)]


async def both(client: Client, request: pb.GenerateRequest) -> pb.GenerateResponse:
    """The unary answer, after checking that a stream of the same request beside it joins to the same (but for what the
    cache held by then). At once, since a step of two rows takes hardly longer than one of one."""
    whole, pieces = await asyncio.gather(client.generate(request, timeout=LIMIT), pieces_of(client, request))
    for choice in whole.choices:
        check_joined(choice, [piece for piece in pieces if piece.index == choice.index])
    for piece in pieces[:-1]:
        assert not any(piece.HasField(field) for field in ("usage", "timings", "prompt"))
    last = pieces[-1]
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.completion_tokens == sum(choice.completion_tokens for choice in whole.choices)
    assert last.prompt.token_ids == whole.prompt.token_ids
    assert near(last.prompt.logprobs, whole.prompt.logprobs)
    assert {piece.request_id for piece in pieces} == {last.request_id} != {whole.request_id}
    return whole


def check_joined(choice: pb.Choice, own: list[pb.GenerateStreamResponse]) -> None:
    """One choice's pieces: they join to the whole, and exactly the last says how it ended."""
    assert "".join(piece.text for piece in own) == choice.text
    assert [token for piece in own for token in piece.token_ids] == list(choice.token_ids)
    assert near([each for piece in own for each in piece.logprobs], choice.logprobs)
    assert [piece.finish_reason for piece in own] == [0] * (len(own) - 1) + [choice.finish_reason]
    for field in ("completion_tokens", "stop_string", "stop_token_id"):
        assert getattr(own[-1], field) == getattr(choice, field)
        if field != "completion_tokens":
            assert own[-1].HasField(field) == choice.HasField(field)


def near(some: Sequence[pb.TokenLogprob], others: Sequence[pb.TokenLogprob], within: float = 2e-3) -> bool:
    """Equal tokens, alternatives and texts; log-probabilities within `within`."""
    return len(some) == len(others) and all(_near(a, b, within) for a, b in zip(some, others, strict=True))


def _near(some: pb.TokenLogprob, other: pb.TokenLogprob, within: float) -> bool:
    return (
        (some.id, some.text, some.HasField("logprob")) == (other.id, other.text, other.HasField("logprob"))
        and abs(some.logprob - other.logprob) <= within
        and [top.id for top in some.top] == [top.id for top in other.top]
        and all(abs(a.logprob - b.logprob) <= within for a, b in zip(some.top, other.top, strict=True))
    )


class Refusal(NamedTuple):
    """How a call ended badly. code: of the trailing metadata."""

    status: grpc.StatusCode
    code: str
    details: str
    seconds: float


async def refused(client: Client, request: pb.GenerateRequest | bytes, method: str = "Generate") -> Refusal:
    """Sends it, as it is, and returns the error; fails the test when there is none."""
    data = request if isinstance(request, bytes) else request.SerializeToString()
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    begun = time.monotonic()
    async with grpc.aio.insecure_channel(client.address, options=options) as channel:
        kind = channel.unary_stream if method == "GenerateStream" else channel.unary_unary
        call: Any = kind(f"/{SERVICE}/{method}", _as_it_is, _as_it_is)(data, timeout=LIMIT)
        try:
            answer = [piece async for piece in call] if method == "GenerateStream" else await call
        except grpc.aio.AioRpcError as error:
            trailing: Any = dict(error.trailing_metadata() or ())
            told = error.details() or ""
            return Refusal(error.code(), trailing.get(ERROR_KEY, ""), told, time.monotonic() - begun)
    raise AssertionError(f"it was answered: {answer!r}")


def _as_it_is(data: bytes) -> bytes:
    return data


async def until(
    client: Client, true: Callable[[pb.GetServerInfoResponse], object], limit: float = LIMIT
) -> pb.GetServerInfoResponse:
    """Waits for a state of the service that satisfies `true`, and returns it."""
    info = None
    try:
        async with asyncio.timeout(limit):
            while not true(info := await client.server_info()):
                await asyncio.sleep(0.02)
        return info
    except TimeoutError:
        raise AssertionError(f"not within {limit} s; the last state was {info}") from None


def idle(info: pb.GetServerInfoResponse) -> bool:
    """No request anywhere, and every block free."""
    return not info.requests and not info.waiting and bool(info.workers) and all(map(_idle, info.workers))


def _idle(worker: pb.Worker) -> bool:
    busy = worker.running or worker.waiting or worker.reserved
    return bool(worker.connected and worker.total_blocks and worker.free_blocks == worker.total_blocks and not busy)


async def until_idle(client: Client, limit: float = 2.0, heartbeat: float = 0.2) -> None:
    """Waits until the service is idle, and still is when every worker has told anew how it is, nothing drawn since.
    limit: seconds until it must be idle for good."""
    end = time.monotonic() + limit
    while True:
        before = await until(client, idle, max(end - time.monotonic(), 0.0))
        await asyncio.sleep(1.5 * heartbeat)
        after = await client.server_info()
        if idle(after) and drawn(before) == drawn(after):
            return
        # What a worker told before a request reached it says nothing about that request.
        assert time.monotonic() < end, f"not idle after {limit} s: {before}, then {after}"


def drawn(info: pb.GetServerInfoResponse) -> dict[str, int]:
    return {worker.id: worker.generated_total for worker in info.workers}


def worker(info: pb.GetServerInfoResponse, role: str) -> pb.Worker | None:
    """The connected worker of a role."""
    return next((each for each in info.workers if each.role == role and each.connected), None)


async def usual(client: Client) -> None:
    """The service answers as always."""
    answer = await client.generate(asks(max_tokens=9), timeout=LIMIT)
    assert (answer.choices[0].text, ids(answer)) == (USUAL, USUAL_IDS)
