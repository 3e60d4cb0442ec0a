"""A service that answers at once, in a process of its own: what the load generator's own speed is measured against.

    python -m diptych.bench.stub [PIECES]

Prints its address. Answers `max_tokens` tokens in PIECES messages; each message's `request_id` is the monotonic clock
(ns) at which it was handed to gRPC, which processes of one machine share.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from diptych.router.client import SERVICE
from diptych.v1 import inference_pb2 as pb


def _handler(pieces: int) -> Any:
    async def stream(request: pb.GenerateRequest, context: Any) -> AsyncIterator[bytes]:
        tokens = int(request.stopping.max_tokens)
        for index in range(pieces):
            count = tokens // pieces + (index < tokens % pieces)
            piece = pb.GenerateStreamResponse(token_ids=range(1, count + 1))
            piece.request_id = str(time.monotonic_ns())
            yield piece.SerializeToString()

    return grpc.unary_stream_rpc_method_handler(stream, pb.GenerateRequest.FromString, None)


def _info() -> Any:
    async def info(request: bytes, context: Any) -> bytes:
        said = pb.GetModelInfoResponse(model="stub", vocabulary=32_000, max_context=1 << 20, max_prompt=1 << 20)
        return said.SerializeToString()

    return grpc.unary_unary_rpc_method_handler(info, None, None)


async def main(pieces: int) -> None:
    server = grpc.aio.server()
    handlers = {"GenerateStream": _handler(pieces), "GetModelInfo": _info()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 2))
