"""The router from the client's side: answers, refusals, waits, losses, cancels; each request ends once and leaves
nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from diptych.contract import wire
from diptych.contract.errors import (
    Cancelled,
    CapacityExceeded,
    ConfigInvalid,
    DeadlineExceeded,
    DecodeLost,
    DiptychError,
    InvalidRequest,
    ModelUnsupported,
    PrefillLost,
    WorkerLost,
)
from diptych.router.client import Client, ask
from diptych.router.server import RouterServer
from diptych.router.settings import RouterSettings
from diptych.router.tokenizer import Tokenizer
from diptych.v1 import inference_pb2 as pb
from tests.router.peer import SECRET, Peer, rule
from tests.router.service import LIMITS, service, until

IDS = [504, 3575, 282]


def expected(count: int, first: int = 0) -> list[int]:
    return [rule(tuple(IDS), position) for position in range(first, count)]


async def streamed(client: Client, request: pb.GenerateRequest, **options: Any) -> list[pb.GenerateStreamResponse]:
    return [piece async for piece in client.stream(request, **options)]


def cancels(peer: Peer) -> int:
    return sum(isinstance(message, wire.Cancel) for message in peer.received)


# ── answers ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("colocated",)])
async def test_unary_and_stream_are_equal(demo_model: Path, tokenizer: Tokenizer, roles: tuple[str, ...]) -> None:
    async with service(demo_model, roles) as s:
        asked = ask(token_ids=IDS, max_tokens=6, n=2, echo=True, logprobs=1)
        asked.response.token_ids = True
        whole = await s.client.generate(asked)
        pieces = await streamed(s.client, asked)
        text = tokenizer.text(IDS) + b"".join(tokenizer.pieces[t] for t in expected(6)).decode("utf-8", "replace")
        for index in (0, 1):
            own = [piece for piece in pieces if piece.index == index]
            choice = whole.choices[index]
            assert choice.text == "".join(piece.text for piece in own) == text
            assert list(choice.token_ids) == [token for piece in own for token in piece.token_ids] == expected(6)
            assert len(choice.logprobs) == sum(len(piece.logprobs) for piece in own) == 6
            assert choice.finish_reason == own[-1].finish_reason == pb.FINISH_REASON_LENGTH
            assert [piece.finish_reason for piece in own[:-1]] == [0] * (len(own) - 1)
        assert whole.usage == pieces[-1].usage == pb.Usage(prompt_tokens=3, completion_tokens=12)
        assert not any(piece.HasField("usage") for piece in pieces[:-1])
        assert list(whole.prompt.token_ids) == list(pieces[-1].prompt.token_ids) == IDS
        assert (
            0 < whole.timings.prepared <= whole.timings.routed <= whole.timings.first_token <= whole.timings.last_token
        )
        await s.idle()


async def test_the_first_token_does_not_wait_for_decode(demo_model: Path) -> None:
    async with service(demo_model) as s:
        s.decode.pace = 0.3
        begun, times = time.monotonic(), []
        async for _ in s.client.stream(ask(token_ids=IDS, max_tokens=2)):
            times.append(time.monotonic() - begun)
        assert times[0] < 0.15
        assert times[-1] > 0.3


async def test_one_token_reserves_nothing(demo_model: Path) -> None:
    async with service(demo_model) as s:
        pieces = await streamed(s.client, ask(token_ids=IDS, max_tokens=1))
        assert "".join(piece.text for piece in pieces)
        assert sum(bool(piece.text) for piece in pieces) == 1
        assert pieces[-1].usage.completion_tokens == 1
        assert s.decode.received == []


async def test_an_end_token_is_counted_but_not_shown(demo_model: Path, tokenizer: Tokenizer) -> None:
    async with service(demo_model) as s:
        third = expected(3)[2]
        answer = await s.client.generate(ask(token_ids=IDS, max_tokens=9, stop_token_ids=[third]))
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.completion_tokens, choice.stop_token_id) == (1, 3, third)
        shown = b"".join(tokenizer.pieces[token] for token in expected(2)).decode("utf-8", "replace")
        assert choice.text == shown
        first = await s.client.generate(ask(token_ids=IDS, max_tokens=9, stop_token_ids=[expected(1)[0]]))
        assert (first.choices[0].text, first.choices[0].completion_tokens) == ("", 1)
        await s.idle()
        assert cancels(s.decode) == 1, "decode's reservation is given back"


async def test_a_stop_string_cancels_decode(demo_model: Path, tokenizer: Tokenizer) -> None:
    async with service(demo_model) as s:
        s.decode.pace = 0.01
        stop = tokenizer.token_text(expected(5)[4]).strip() or tokenizer.token_text(expected(5)[4])
        whole = await s.client.generate(ask(token_ids=IDS, max_tokens=500, stop=[stop]))
        pieces = await streamed(s.client, ask(token_ids=IDS, max_tokens=500, stop=[stop]))
        assert whole.choices[0].text == "".join(piece.text for piece in pieces)
        assert whole.choices[0].stop_string == pieces[-1].stop_string == stop
        assert whole.usage.completion_tokens == pieces[-1].usage.completion_tokens <= 5
        await s.idle()


async def test_cached_tokens_and_ids(demo_model: Path) -> None:
    async with service(demo_model) as s:
        s.prefill.cached = 2
        call = Client(s.client.address)
        async with call:
            answer = await call.generate(ask(token_ids=IDS, max_tokens=4))
        assert answer.usage.cached_tokens == 2
        assert answer.request_id.startswith("req-")


async def test_info(demo_model: Path) -> None:
    async with service(demo_model) as s:
        model = await s.client.model_info()
        assert (model.vocabulary, model.max_context, list(model.end_token_ids), model.chat) == (49_152, 8192, [2], True)
        assert model.model == demo_model.name
        server = await s.client.server_info()
        assert server.ready
        assert [(worker.role, worker.connected) for worker in server.workers] == [("decode", True), ("prefill", True)]
        assert [list(worker.expert_tokens) for worker in server.workers] == [[5, 0, 7], [5, 0, 7]]


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def raw(client: Client, data: bytes) -> grpc.aio.AioRpcError:
    method: Any = client._channel.unary_unary("/diptych.v1.Inference/Generate", lambda b: b, lambda b: b)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await method(data)
    return failed.value


async def test_bad_input_gets_a_sentence_and_others_go_on(demo_model: Path) -> None:
    async with service(demo_model, settings=RouterSettings(limits=LIMITS, max_message_bytes=10_000)) as s:
        s.decode.pace = 0.02
        beside = asyncio.create_task(s.client.generate(ask(token_ids=IDS, max_tokens=30)))
        for data, status, words in [
            (b"\x0a\x02\xff\xfe", grpc.StatusCode.INVALID_ARGUMENT, "UTF-8"),
            (b"\x0a\x9f" + b"x" * 12_000, grpc.StatusCode.INVALID_ARGUMENT, "10000"),
            (b"x" * 40_000, grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than"),
            (b"", grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
            (ask("").SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT, "empty"),
            (ask("a " * 4000, max_tokens=8192).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
            (ask("x", temperature=float("nan")).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
            (ask(token_ids=[49_152]).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        ]:
            error = await raw(s.client, data)
            assert (error.code(), words in (error.details() or "")) == (status, True), error.details()
            if status is grpc.StatusCode.INVALID_ARGUMENT:
                trailing: Any = error.trailing_metadata()
                assert dict(trailing)["diptych-error"] == "InvalidRequest"
        assert (await beside).usage.completion_tokens == 30
        await s.idle()


async def test_a_message_too_large_for_the_channel_gets_a_sentence_from_the_client(demo_model: Path) -> None:
    async with service(demo_model, settings=RouterSettings(limits=LIMITS, max_message_bytes=10_000)) as s:
        with pytest.raises(InvalidRequest, match="10000"):
            await s.client.generate(ask("a " * 6_000, max_tokens=1))
        words = r"more than twice as large as the service takes; it was refused unread \(.*vs\. 20000\)"
        with pytest.raises(InvalidRequest, match=words):
            await s.client.generate(ask("a " * 20_000, max_tokens=1))
        with pytest.raises(InvalidRequest, match=words):
            [piece async for piece in s.client.stream(ask("a " * 20_000, max_tokens=1))]
        await s.idle()


async def test_what_a_worker_refuses(demo_model: Path) -> None:
    async with service(demo_model) as s:
        s.decode.refuse = ("CapacityExceeded", "It needs 9 blocks and there are 8.")
        with pytest.raises(CapacityExceeded, match="9 blocks"):
            await s.client.generate(ask(token_ids=IDS, max_tokens=9))
        await s.idle()
        assert cancels(s.prefill) == 1


async def test_start_refuses_what_cannot_work(demo_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with service(demo_model) as s:
            router = RouterServer(demo_model, s.registry, SECRET, RouterSettings(port=port))
            with pytest.raises(ConfigInvalid, match=str(port)):
                await router.start()
    with pytest.raises(ModelUnsupported, match="missing"):
        RouterServer(tmp_path / "missing", s.registry, SECRET, RouterSettings())
    (tmp_path / "config.json").write_text((demo_model / "config.json").read_text())
    with pytest.raises(ModelUnsupported, match="tokenizer"):
        RouterServer(tmp_path, s.registry, SECRET, RouterSettings())


async def test_too_many_at_once(demo_model: Path) -> None:
    async with service(demo_model, (), RouterSettings(limits=LIMITS, max_active=2, max_queue=1)) as s:
        first = asyncio.create_task(s.client.generate(ask(token_ids=IDS, max_tokens=2), timeout=0.5))
        await until(lambda: s.router.desk.waiting == 1)
        with pytest.raises(CapacityExceeded, match="wait already, because no worker is connected"):
            await s.client.generate(ask(token_ids=IDS, max_tokens=2))
        second = asyncio.create_task(s.client.generate(ask(token_ids=IDS, max_tokens=2, n=1), timeout=0.5))
        await asyncio.gather(first, second, return_exceptions=True)
        await s.idle()


# ── waiting ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_request_waits_for_workers(demo_model: Path) -> None:
    async with service(demo_model, ()) as s:
        waiting = asyncio.create_task(s.client.generate(ask(token_ids=IDS, max_tokens=4)))
        await until(lambda: s.router.desk.waiting == 1)
        prefill = await Peer(s.registry, "prefill").start()
        decode = await Peer(s.registry, "decode").start()
        s.peers |= {"prefill": prefill, "decode": decode}
        await until(lambda: len(s.router.desk.sessions.open()) == 2)
        assert not waiting.done()
        prefill.link(decode)
        assert (await waiting).usage.completion_tokens == 4
        await s.idle()
        for peer in (prefill, decode):
            await peer.kill()


async def test_the_deadline_fires_wherever_a_request_is(demo_model: Path) -> None:
    async with service(demo_model, ()) as s:
        with pytest.raises(DeadlineExceeded):
            await s.client.generate(ask(token_ids=IDS, max_tokens=4), timeout=0.2)
    settings = RouterSettings(limits=LIMITS.__class__(heartbeat=0.2, lease=1.0, request=0.3, handshake=1.0))
    async with service(demo_model, (), settings) as s:
        with pytest.raises(DeadlineExceeded, match=r"0\.3 s ran out while it waited: no worker is connected"):
            await s.client.generate(ask(token_ids=IDS, max_tokens=4))
    async with service(demo_model, settings=settings) as s:
        s.decode.pace = 0.05
        with pytest.raises(DeadlineExceeded, match="ran out after"):
            await s.client.generate(ask(token_ids=IDS, max_tokens=400))
        s.decode.hold_grant.clear()
        with pytest.raises(DeadlineExceeded):
            await s.client.generate(ask(token_ids=IDS, max_tokens=400))
        await s.idle()


# ── leaving ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["unary", "stream", "before the first token", "abort"])
async def test_a_client_that_leaves_ends_the_work(demo_model: Path, kind: str) -> None:
    async with service(demo_model) as s:
        s.decode.pace = 0.02
        if kind == "before the first token":
            s.prefill.hold_first.clear()
        request = ask(token_ids=IDS, max_tokens=5000)
        pieces: list[Any] = []

        async def read() -> None:
            if kind == "unary":
                await s.client.generate(request)
            async for piece in s.client.stream(request):
                pieces.append(piece)

        reading = asyncio.create_task(read())
        await until(lambda: bool(s.prefill.working or s.decode.working) and (kind != "stream" or bool(pieces)))
        if kind == "abort":
            await until(lambda: bool(pieces))
            assert await s.client.abort(pieces[0].request_id)
            with pytest.raises(Cancelled):
                await reading
            assert not await s.client.abort("req-0")
        else:
            reading.cancel()
        begun = time.monotonic()
        await until(lambda: not s.prefill.working and not s.decode.working)
        assert time.monotonic() - begun < 0.2
        assert cancels(s.decode) == 1
        await s.idle()


# ── losses ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("side", "kind"), [("prefill", PrefillLost), ("decode", DecodeLost)])
async def test_a_killed_worker_is_a_typed_error_at_once(demo_model: Path, side: str, kind: type[DiptychError]) -> None:
    async with service(demo_model) as s:
        victim, other = s.peers[side], s.decode if side == "prefill" else s.prefill
        s.prefill.hold_first.clear()
        if side == "decode":
            s.decode.hold_grant.clear()
        asking = asyncio.create_task(s.client.generate(ask(token_ids=IDS, max_tokens=50)))
        await until(lambda: bool(s.prefill.working and s.decode.working))
        begun = time.monotonic()
        await victim.kill()
        with pytest.raises(kind):
            await asking
        assert time.monotonic() - begun < 0.5
        await until(lambda: not other.working)
        s.peers = {"other": other}
        await s.idle()


async def test_a_silent_worker_loses_its_lease(demo_model: Path) -> None:
    async with service(demo_model) as s:
        asking = asyncio.create_task(s.client.generate(ask(token_ids=IDS, max_tokens=5000)))
        await until(lambda: bool(s.decode.working))
        begun = time.monotonic()
        s.decode.mute = True
        with pytest.raises(DecodeLost, match="silent"):
            await asking
        assert LIMITS.lease * 0.5 < time.monotonic() - begun < LIMITS.lease + 3 * LIMITS.heartbeat
        s.decode.mute = False
        await until(lambda: len(s.router.desk.sessions.open()) == 2, 5)
        assert (await s.client.generate(ask(token_ids=IDS, max_tokens=3))).usage.completion_tokens == 3


async def test_a_replaced_worker_serves(demo_model: Path) -> None:
    async with service(demo_model) as s:
        await s.decode.kill()
        s.peers["decode"] = await Peer(s.registry, "decode").start()
        s.decode.link(s.prefill)
        assert (await s.client.generate(ask(token_ids=IDS, max_tokens=3), timeout=10)).usage.completion_tokens == 3
        await s.decode.kill()


async def test_who_does_not_know_the_secret_gets_no_work(demo_model: Path) -> None:
    async with service(demo_model) as s:
        stranger = await Peer(s.registry, "decode", "stranger", secret=b"another secret").start()
        stranger.link(s.prefill)
        for _ in range(4):
            await s.client.generate(ask(token_ids=IDS, max_tokens=2))
        assert stranger.received == []
        assert s.router.desk.sessions.find(stranger.id) is None
        await stranger.kill()


async def test_a_lost_registry_changes_nothing(demo_model: Path) -> None:
    async with service(demo_model) as s:
        s.registry.gone = True
        await asyncio.sleep(1.2)
        assert (await s.client.generate(ask(token_ids=IDS, max_tokens=3))).usage.completion_tokens == 3


async def test_stopping_drains(demo_model: Path) -> None:
    async with service(demo_model) as s:
        s.decode.pace = 0.01
        asking = asyncio.create_task(s.client.generate(ask(token_ids=IDS, max_tokens=40)))
        await until(lambda: bool(s.decode.working))
        await s.router.stop(5)
        assert (await asking).usage.completion_tokens == 40
        with pytest.raises(WorkerLost, match="No router answers"):
            await s.client.generate(ask(token_ids=IDS, max_tokens=2))


async def test_stopping_without_patience_tells_the_workers(demo_model: Path) -> None:
    async with service(demo_model) as s:
        asking = asyncio.create_task(s.client.generate(ask(token_ids=IDS, max_tokens=50_000 // 10)))
        await until(lambda: bool(s.decode.working))
        await s.router.stop(0.1)
        with pytest.raises(DiptychError):
            await asking
        await until(lambda: not s.decode.working)


async def test_a_storm_leaves_nothing(demo_model: Path) -> None:
    """Finished, aborted, expired and failed requests at once, and a decode worker dies in the middle of it."""
    async with service(demo_model, ("prefill", "prefill2", "decode", "decode2")) as s:
        draw = random.Random(3)
        ends: dict[str, int] = {}

        async def one(number: int) -> None:
            await asyncio.sleep(draw.random())
            request = ask(token_ids=[*IDS, number], max_tokens=draw.choice([1, 3, 40]), n=draw.choice([1, 2]))
            task = asyncio.create_task(s.client.generate(request, timeout=draw.choice([None, 0.02])))
            if draw.random() < 0.3:
                asyncio.get_running_loop().call_later(draw.random() * 0.1, task.cancel)
            try:
                await task
                end = "done"
            except asyncio.CancelledError:
                end = "left"
            except DiptychError as error:
                end = error.code
            ends[end] = ends.get(end, 0) + 1

        async def murder() -> None:
            await asyncio.sleep(0.5)
            await s.peers.pop("decode2").kill()

        await asyncio.gather(murder(), *(one(number) for number in range(200)))
        assert sum(ends.values()) == 200
        assert ends["done"] > 50
        assert ends["left"] > 10
        assert set(ends) <= {"done", "left", "DeadlineExceeded", "DecodeLost"}
        await s.idle()
        assert all(session.outstanding == 0 for session in s.router.desk.sessions.open())
        with contextlib.suppress(DiptychError):
            await s.client.generate(ask(token_ids=IDS, max_tokens=3))
