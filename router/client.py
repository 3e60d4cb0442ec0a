"""The gRPC client that the command line, the demo and the tests use. Its errors are those of the error tree."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from diptych.contract.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    DiptychError,
    Internal,
    InvalidRequest,
    Unauthenticated,
    WorkerLost,
    from_wire,
)
from diptych.v1 import inference_pb2 as pb

SERVICE = "diptych.v1.Inference"
ERROR_KEY = "diptych-error"
ROLES = {"system": pb.ROLE_SYSTEM, "user": pb.ROLE_USER, "assistant": pb.ROLE_ASSISTANT, "tool": pb.ROLE_TOOL}

_BY_STATUS: dict[grpc.StatusCode, type[DiptychError]] = {
    grpc.StatusCode.UNAVAILABLE: WorkerLost,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
}


def ask(
    text: str | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    token_ids: Sequence[int] | None = None,
    **options: Any,
) -> pb.GenerateRequest:
    """A request from plain values. messages: {"role", "content", …}; content may be a list of texts.

    options: any field of `Sampling`, `Stopping`, `ResponseOptions` or `Chat` by its name; `model`, `cache_salt`.
    """
    request = pb.GenerateRequest()
    if text is not None:
        request.text = text
    if token_ids is not None:
        request.token_ids.ids.extend(token_ids)
    if messages is not None:
        request.chat.messages.extend(_message(message) for message in messages)
    for name, value in options.items():
        _set(request, name, value)
    return request


def _set(request: pb.GenerateRequest, name: str, value: Any) -> None:
    for part in (request, request.sampling, request.stopping, request.response, request.chat):
        field = part.DESCRIPTOR.fields_by_name.get(name)
        if field is None:
            continue
        target = getattr(part, name)
        try:
            if field.message_type is not None:
                target.update(value)
            elif field.is_repeated:
                target.extend(value)
            else:
                setattr(part, name, value)
        except (ValueError, TypeError) as error:  # protobuf's own words for what no field can hold
            raise InvalidRequest(f"{name} cannot be {value!r}: {error}.") from error
        return
    raise TypeError(f"A request has no field {name!r}.")


def _message(message: Mapping[str, Any]) -> pb.Message:
    made = pb.Message(role=ROLES[message["role"]])
    content = message.get("content")
    if isinstance(content, str):
        made.text = content
    elif content is not None:
        made.parts.parts.extend(pb.ContentPart(text=text) for text in content)
    for field in ("name", "tool_call_id"):
        if field in message:
            setattr(made, field, message[field])
    for call in message.get("tool_calls", ()):
        made.tool_calls.add(id=call["id"], name=call["name"], arguments_json=json.dumps(call["arguments"]))
    return made


class Client:
    """A channel to one router; `async with Client(address) as client`. Ending an iteration aborts its request."""

    def __init__(self, address: str) -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=[*options, ("grpc.enable_http_proxy", 0)])

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(grace=None)

    async def stream(
        self, request: pb.GenerateRequest, timeout: float | None = None, traceparent: str = ""
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """The pieces as they come. timeout: seconds until the request's deadline."""
        answer = pb.GenerateStreamResponse.FromString
        method: Any = self._channel.unary_stream(f"/{SERVICE}/GenerateStream", _bytes, answer)
        call = method(request, timeout=timeout, metadata=_metadata(traceparent))
        try:
            async for piece in call:
                yield piece
        except grpc.aio.AioRpcError as error:
            self._raise(error)
        finally:
            call.cancel()

    async def generate(
        self, request: pb.GenerateRequest, timeout: float | None = None, traceparent: str = ""
    ) -> pb.GenerateResponse:
        answer: pb.GenerateResponse = await self._unary("Generate", request, pb.GenerateResponse, timeout, traceparent)
        return answer

    async def abort(self, request_id: str) -> bool:
        answer: pb.AbortResponse = await self._unary("Abort", pb.AbortRequest(request_id=request_id), pb.AbortResponse)
        return answer.found

    async def model_info(self, timeout: float | None = 10.0) -> pb.GetModelInfoResponse:
        answer: pb.GetModelInfoResponse = await self._unary(
            "GetModelInfo", pb.GetModelInfoRequest(), pb.GetModelInfoResponse, timeout
        )
        return answer

    async def server_info(self, timeout: float | None = 10.0) -> pb.GetServerInfoResponse:
        answer: pb.GetServerInfoResponse = await self._unary(
            "GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoResponse, timeout
        )
        return answer

    async def _unary(
        self, name: str, request: Message, kind: type[Message], timeout: float | None = None, traceparent: str = ""
    ) -> Any:
        method: Any = self._channel.unary_unary(f"/{SERVICE}/{name}", _bytes, kind.FromString)
        try:
            return await method(request, timeout=timeout, metadata=_metadata(traceparent))
        except grpc.aio.AioRpcError as error:
            self._raise(error)

    def _raise(self, error: grpc.aio.AioRpcError) -> NoReturn:
        """The router's own error by its code; else what the status means when no router answered."""
        trailing: Any = error.trailing_metadata()
        code = next((str(value) for key, value in trailing or () if key == ERROR_KEY), "")
        details = error.details() or error.code().name
        if code:
            raise from_wire(code, details) from None
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
            # Refused by gRPC before the router saw it, which would have named its own, smaller limit.
            raise InvalidRequest(
                f"The request is more than twice as large as the service takes; it was refused unread ({details})."
            ) from None
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            details = f"No router answers at {self.address} ({details})."
        raise _BY_STATUS.get(error.code(), Internal)(details) from None


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()


def _metadata(traceparent: str) -> tuple[tuple[str, str], ...]:
    return (("traceparent", traceparent),) if traceparent else ()
