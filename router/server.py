"""The public gRPC server of one router: calls in, answers out.

Owns the server, its port, and the one place where an error becomes a status. All that it serves is put together here:
tokenizer, preparer, desk, sessions, artist. One event loop; `start` and `stop` once each.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.trace import TracerProvider

from diptych.contract.errors import Cancelled, ConfigInvalid, DiptychError, Internal, InvalidRequest
from diptych.contract.registry import Registry
from diptych.router.call import Call, Piece
from diptych.router.facts import model_facts
from diptych.router.life import Desk
from diptych.router.prepare import Preparer
from diptych.router.replies import Replies, model_info, server_info
from diptych.router.sessions import Sessions
from diptych.router.settings import RouterSettings
from diptych.router.spans import Artist
from diptych.router.tokenizer import Tokenizer
from diptych.router.validate import parse
from diptych.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")

SERVICE = "diptych.v1.Inference"
ERROR_KEY = "diptych-error"
REQUEST_ID_KEY = "diptych-request-id"
Context = grpc.aio.ServicerContext[bytes, Any]


class RouterServer:
    """Serves one model folder with the workers of one registry.

    The constructor loads the tokenizer (seconds; call it off the loop) and raises `ModelUnsupported`. `start` raises
    `ConfigInvalid` when the port is taken; it returns before any worker is connected, and requests wait until some are.
    tracing: who records spans, if not the process's own provider. tokenizer: the folder's, if it is loaded already.
    """

    def __init__(
        self,
        model_folder: Path,
        registry: Registry,
        secret: bytes,
        settings: RouterSettings,
        tracing: TracerProvider | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.settings = settings
        self._tracing = tracing
        self.facts = model_facts(model_folder, settings.model_name)
        self.tokenizer = tokenizer or Tokenizer.load(model_folder)
        self.port = 0
        self._registry = registry
        self._secret = secret
        self._replies = Replies(self.tokenizer)
        self._health = cast(Any, health).aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listens; returns the port."""
        if not self.settings.share_port:
            must_be_free(self.settings.host, self.settings.port)
        self._artist = Artist(self.facts.name, self._tracing)
        self._preparer = Preparer(self.tokenizer, self.facts, self.settings)
        self.desk = Desk(self.settings, self.facts, self._artist.draw)
        self.desk.sessions = Sessions(self._registry, self._secret, self.settings.limits, self.desk)
        server = grpc.aio.server(options=self._options())
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, self._handlers()),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        self.port = _bind(server, self.settings.host, self.settings.port)
        await server.start()
        self._server = server
        await self.desk.sessions.start()
        for name in ("", SERVICE):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return self.port

    async def stop(self, drain: float | None = None) -> None:
        """Takes no new calls, gives running ones `drain` seconds (default: limits.drain), ends the rest."""
        if self._server is None:
            return
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self.settings.limits.drain if drain is None else drain)
        await self.desk.drained(self.settings.limits.heartbeat)
        await self.desk.sessions.stop()
        self._preparer.close()
        await asyncio.to_thread(self._artist.close)
        self._server = None

    # ── methods ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _generate(self, data: bytes, context: Context) -> Message:
        with _handling(await self._open(context)) as call:
            await self._begin(call, data)
            pieces = await call.collect()
            await call.prompt_known(self.settings.limits.heartbeat)
            answer = await self._build(call, lambda: self._replies.whole(call, pieces))
            now = time.monotonic_ns()
            for piece in pieces:
                piece.choice.marks.first_delivered = piece.choice.marks.first_ready
                call.delivered(piece, now)
            return answer

    async def _stream(self, data: bytes, context: Context) -> None:
        with _handling(await self._open(context)) as call:
            await self._begin(call, data)
            async for pieces in call.pieces():
                for number, piece in enumerate(pieces, 1):
                    await context.write(await self._chunk(call, piece, last=call.done and number == len(pieces)))
                    call.delivered(piece, time.monotonic_ns())

    async def _chunk(self, call: Call, piece: Piece, last: bool) -> pb.GenerateStreamResponse:
        chunk = self._replies.chunk(call, piece)
        if last:
            await call.prompt_known(self.settings.limits.heartbeat)
            await self._build(call, lambda: self._replies.last(call, chunk))
        return chunk

    async def _build(self, call: Call, work: Callable[[], T]) -> T:
        """Log-probabilities of thousands of tokens are a quarter of a second's work: not on the loop."""
        order = call.prepared.order if call.prepared is not None else None
        if order is None or (order.logprobs is None and order.prompt_logprobs is None):
            return work()
        return await self._preparer.apart(work)

    async def _open(self, context: Context) -> Call:
        """The call, in the books, its id told to the client. `leave` must follow."""
        received = time.monotonic_ns()
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        limits = self.settings.limits
        asked = context.time_remaining()
        seconds = min(limits.request if asked is None else asked, limits.request_max)
        root, traceparent = self._artist.open(received, metadata)
        call = Call(f"req-{secrets.token_hex(8)}", received, seconds, root, traceparent)
        try:
            self.desk.open(call)
        except DiptychError as error:
            call.error = error
            self._artist.draw(call)
            raise
        context.add_done_callback(lambda _context: call.leave())  # type: ignore[arg-type]  # whatever becomes of the handler
        await context.send_initial_metadata(((REQUEST_ID_KEY, call.id),))
        return call

    async def _begin(self, call: Call, data: bytes) -> None:
        prepared = await self._preparer.prepare(data, self.desk.room(), self.desk.block_sizes())
        if call.error is not None:
            raise call.error
        call.prepare(prepared, lambda: self._preparer.text_stream(prepared))
        self.desk.start(call)

    async def _abort(self, data: bytes, context: Context) -> Message:
        asked = cast("pb.AbortRequest", parse(data, pb.AbortRequest, self.settings.max_message_bytes))
        if not asked.request_id:
            raise InvalidRequest("request_id is missing.")
        return pb.AbortResponse(found=self.desk.abort(asked.request_id, Cancelled("The request was aborted.")))

    async def _model_info(self, data: bytes, context: Context) -> Message:
        parse(data, pb.GetModelInfoRequest, self.settings.max_message_bytes)
        return model_info(self.facts, self.desk, self._preparer.template.exists)

    async def _server_info(self, data: bytes, context: Context) -> Message:
        parse(data, pb.GetServerInfoRequest, self.settings.max_message_bytes)
        return server_info(self.desk)

    # ── the server ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler[bytes, Message]]:
        """Requests stay bytes: a message that cannot be parsed gets our sentence, not gRPC's INTERNAL."""
        unary = {
            "Generate": self._generate,
            "Abort": self._abort,
            "GetModelInfo": self._model_info,
            "GetServerInfo": self._server_info,
        }
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(_answering(method), None, _bytes)
            for name, method in unary.items()
        }
        handlers["GenerateStream"] = grpc.unary_stream_rpc_method_handler(_answering(self._stream), None, _bytes)
        return handlers

    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.so_reuseport", int(self.settings.share_port)),
            # Our own limit speaks first and in a sentence; gRPC's ends what is larger still.
            ("grpc.max_receive_message_length", 2 * self.settings.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.keepalive_time_ms", 60_000),
            ("grpc.keepalive_timeout_ms", 20_000),
        ]


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()


@contextlib.contextmanager
def _handling(call: Call) -> Iterator[Call]:
    """A handler's time with its call: whatever ends it is the call's error, for the client and in the trace."""
    try:
        yield call
    except DiptychError as error:
        call.fail(error)
        raise
    except grpc.aio.BaseError:  # the transport ended under us: the client has left
        raise
    except Exception as error:
        log.exception("%s failed", call.id)
        failure = _unexpected(error)
        call.error = call.error or failure  # also where every choice had ended well: its answer could not be told
        call.fail(failure)
        raise failure from error
    finally:
        call.leave()


def _unexpected(error: Exception) -> Internal:
    return Internal(f"An unexpected {type(error).__name__}.")


def _answering(method: Callable[[bytes, Context], Awaitable[T]]) -> Callable[[bytes, Context], Awaitable[T]]:
    async def answer(data: bytes, context: Context) -> T:
        try:
            return await method(data, context)
        except DiptychError as error:
            failure = error
        except Exception as error:
            log.exception("a call failed")
            failure = _unexpected(error)
        return await abort(context, failure)

    return answer


async def abort(context: Context, error: DiptychError) -> NoReturn:
    """The one place where an error becomes a gRPC status: the class's, one line of details, its code behind it."""
    sentence = str(error) if isinstance(error, InvalidRequest) else f"{error} {error.hint}"
    details = " ".join(sentence.split())[:1000]
    await context.abort(grpc.StatusCode[error.grpc], details, ((ERROR_KEY, error.code),))


def must_be_free(host: str, port: int) -> None:
    """Raises `ConfigInvalid` naming the port when somebody listens on it. gRPC alone would share it without a word."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise ConfigInvalid(
                f"Port {port} on {host} cannot be used: {error.strerror}. Choose another port."
            ) from None


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    try:
        bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError:
        bound = 0
    if not bound:
        raise ConfigInvalid(f"Port {port} on {host} cannot be used. Choose another port.")
    return bound
