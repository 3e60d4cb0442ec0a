"""A worker group's front as a plain process: what `local.py` starts, and the other end of its channel.

    launcher ──Launch, Stop──▶ this process ──Loading…, Up | Down──▶ launcher

The channel is an inherited socket pair: the secret is in no argument, environment or file. Each message is a packed
struct after its length (4 bytes, big-endian). When the launcher's end closes, its process is gone, and the group ends.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from functools import partial

import msgspec

from diptych.cluster.registry import RegistryClient
from diptych.contract.errors import DiptychError, Internal
from diptych.contract.logs import log_to_stderr
from diptych.contract.wire import WorkerInfo
from diptych.workers.channel import Loading
from diptych.workers.settings import WorkerSettings
from diptych.workers.worker import Worker

MAX_MESSAGE = 1 << 20


class Launch(msgspec.Struct, frozen=True, tag=True):
    """First message to the process: all that it needs."""

    settings: WorkerSettings
    secret: bytes
    registry: str
    epoch: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    drain: bool


class Up(msgspec.Struct, frozen=True, tag=True):
    """The group is ready."""

    info: WorkerInfo


class Down(msgspec.Struct, frozen=True, tag=True):
    """The group has ended or could not start; the process ends next. code: empty for a wanted end."""

    code: str
    message: str


ToProcess = Launch | Stop
FromProcess = Loading | Up | Down
to_process = msgspec.msgpack.Decoder(ToProcess)
from_process = msgspec.msgpack.Decoder(FromProcess)
_encoder = msgspec.msgpack.Encoder()


async def receive(reader: asyncio.StreamReader) -> bytes | None:
    """The next message, or None when the other process has gone."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        return await reader.readexactly(size) if size <= MAX_MESSAGE else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Queues one message; messages here are few and small, so nobody waits for the buffer."""
    data = _encoder.encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)


async def serve(channel: socket.socket) -> int:
    """Runs one group over `channel` until it ends, is told to, or the launcher goes."""
    reader, writer = await asyncio.open_connection(sock=channel)
    first = await receive(reader)
    launch = None if first is None else to_process.decode(first)
    if not isinstance(launch, Launch):
        return 2
    registry = RegistryClient(launch.registry, launch.secret)
    worker = Worker(launch.settings, launch.secret, registry, launch.epoch, partial(send, writer))
    down = await _live(worker, reader, writer)
    send(writer, down)
    writer.close()
    await registry.close()
    return 1 if down.code else 0


async def _live(worker: Worker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Down:
    told = asyncio.create_task(_told(reader))
    running = asyncio.create_task(_run(worker, writer))
    await asyncio.wait((told, running), return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        told.cancel()
        return running.result()
    running.cancel()
    await worker.stop(told.result())
    return Down("", "stopped")


async def _told(reader: asyncio.StreamReader) -> bool:
    """Whether to drain, once told to stop; a launcher that is gone does not wait for anything."""
    message = await receive(reader)
    order = None if message is None else to_process.decode(message)
    return isinstance(order, Stop) and order.drain


async def _run(worker: Worker, writer: asyncio.StreamWriter) -> Down:
    try:
        send(writer, Up(await worker.start()))
        return Down(Internal.__name__, await worker.wait())
    except DiptychError as error:
        await worker.stop(False)
        return Down(error.code, str(error))


def main() -> int:
    """`python -m diptych.cluster.worker_process FD`. Ctrl-C in the terminal is the launcher's matter."""
    log_to_stderr()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    sys.exit(main())
