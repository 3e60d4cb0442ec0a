"""The two-rank `torch.distributed` group that carries one link's payload: gloo between CPUs, NCCL between GPUs.

No default world is made. The receiver is rank 0 and its store makes the rendezvous, under a name used once. After any
error a pair is thrown away: nothing local frees a blocked gloo wait, and an aborted NCCL operation may return without
an error and leave part of its data, which is why every payload ends in a trailer that the receiver checks.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from threading import Thread
from typing import Any, Literal, Protocol

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from diptych.contract.errors import DiptychError, Internal, TransferCorrupt, TransferFailed, TransferTimeout

Transport = Literal["gloo", "nccl"]
PAYLOAD, MARKER, ANSWER = 1, 2, 3
RECEIVER, SENDER = 0, 1
TRAILER = 16
_MAGIC = 0x4B56_6F6E_7761_7265
OPENING_LOOK = 0.05  # seconds between two looks at whether the peer of a pair that is being made still lives


def host_store(host: str, limit: float) -> tuple[TCPStore, tuple[str, int]]:
    """A store of this process, listening on `host` alone (a bare TCPStore listens everywhere)."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.bind((host, 0))
    sock.listen(128)
    port = sock.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=limit),
        master_listen_fd=sock.detach(),
    )
    return store, (host, port)


def connect_store(address: tuple[str, int], limit: float) -> TCPStore:
    try:
        return TCPStore(
            address[0], address[1], is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit)
        )
    except RuntimeError as error:
        raise TransferFailed(f"The receiver's store at {address[0]}:{address[1]} did not answer: {error}") from error


class Pair(Protocol):
    """One end of a pair, used by the link's own thread only; every wait ends within the limit it was made with.

    `send` and `receive` post, `finish` waits. Buffers stay the caller's and must not be touched in between; they are
    uint8, contiguous, on the pair's device. `alive`, given to `finish`, raises when the link's peer is gone.
    """

    def send(self, payload: torch.Tensor) -> list[Any]: ...
    def receive(self, into: torch.Tensor) -> list[Any]: ...
    def finish(self, works: list[Any], alive: Callable[[], None]) -> None: ...
    def answer(self, alive: Callable[[], None]) -> None: ...
    def close(self) -> None: ...


def make_pair(
    transport: Transport, store: TCPStore, name: str, rank: int, host: str, device: str, limit: float
) -> Pair:
    """Joins the group of that name; the other side does the same at the same moment. limit: of each later wait."""
    prefixed = PrefixStore(f"pair/{name}", store)
    try:
        if transport == "nccl":
            return NcclPair(prefixed, rank, device, limit)
        return GlooPair(prefixed, rank, host, limit)
    except RuntimeError as error:
        raise TransferFailed(f"The two-rank group {name} could not be made: {error}") from error


def open_pair(make: Callable[[], Pair], first: Callable[[Pair], None], alive: Callable[[], None], limit: float) -> Pair:
    """The pair that `make` joins, after `first` has passed a message over it. Raises what either raises, what `alive`
    raises when the link's peer is gone, and `TransferTimeout` after `limit` seconds.

    Both run in a thread of their own, since nothing interrupts a library that waits there for a peer: NCCL connects
    within the first message and knows no limit for it. A thread that was given up closes its pair when it comes back.
    """
    future: Future[Pair] = Future()

    def run() -> None:
        pair: Pair | None = None
        try:
            pair = make()
            first(pair)
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for it
            if pair is not None:
                pair.close()
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
            return
        if future.set_running_or_notify_cancel():
            future.set_result(pair)
        else:
            pair.close()

    Thread(target=run, name="pair-opening", daemon=True).start()
    deadline = time.monotonic() + limit
    try:
        while not futures.wait([future], OPENING_LOOK).done:
            alive()
            if time.monotonic() > deadline:
                raise TransferTimeout(f"The two-rank group was not made within {limit:.0f} s.")
    except DiptychError:
        if not future.cancel() and future.exception() is None:
            future.result().close()
        raise
    return future.result()


class GlooPair:
    """Between CPUs. A peer that dies is noticed by a large message only at the group's timeout, but by a small one
    within milliseconds: so a one-byte marker trails every payload and is waited for first, and the sender waits first
    for a one-byte answer."""

    def __init__(self, store: PrefixStore, rank: int, host: str, limit: float) -> None:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=limit)
        self.peer = 1 - rank
        self.group: Any = ProcessGroupGloo(store, rank, 2, options)
        self._byte = torch.zeros(1, dtype=torch.uint8)

    def send(self, payload: torch.Tensor) -> list[Any]:
        return [
            self.group.recv([torch.zeros(1, dtype=torch.uint8)], self.peer, ANSWER),
            self.group.send([payload], self.peer, PAYLOAD),
            self.group.send([self._byte], self.peer, MARKER),
        ]

    def receive(self, into: torch.Tensor) -> list[Any]:
        return [
            self.group.recv([torch.zeros(1, dtype=torch.uint8)], self.peer, MARKER),
            self.group.recv([into], self.peer, PAYLOAD),
        ]

    def finish(self, works: list[Any], alive: Callable[[], None]) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            what = str(error).splitlines()[0]
            kind = TransferTimeout if "Timed out" in what else TransferFailed
            raise kind(f"The two-rank group failed: {what}") from error

    def answer(self, alive: Callable[[], None]) -> None:
        """Tells the sender that a payload arrived."""
        self.finish([self.group.send([self._byte], self.peer, ANSWER)], alive)

    def close(self) -> None:
        del self.group


class NcclPair:
    """Between GPUs, on a stream of its own. A dead peer shows on the link's control socket, never here: an operation
    that waits for it spins until `close` aborts the communicator, which ends it from this side."""

    def __init__(self, store: PrefixStore, rank: int, device: str, limit: float) -> None:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=limit)
        options.config.min_ctas, options.config.max_ctas = 1, int(os.environ.get("NCCL_MAX_CTAS", "4"))
        self.peer, self.device, self.limit = 1 - rank, torch.device(device), limit
        self.group: Any = ProcessGroupNCCL(store, rank, 2, options)
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def send(self, payload: torch.Tensor) -> list[Any]:
        return self._post(self.group.send, payload)

    def receive(self, into: torch.Tensor) -> list[Any]:
        return self._post(self.group.recv, into)

    def _post(self, operation: Callable[..., Any], buffer: torch.Tensor) -> list[Any]:
        with torch.cuda.stream(self.stream):
            work = operation([buffer], self.peer, 0)
            work.wait()  # orders this stream after NCCL's own; the host does not wait
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self.stream)
        return [done, work]

    def finish(self, works: list[Any], alive: Callable[[], None]) -> None:
        done, _ = works
        deadline = time.monotonic() + self.limit
        while not done.query():
            alive()
            if time.monotonic() > deadline:
                raise TransferTimeout(f"A payload made no progress for {self.limit:.0f} s.")
            time.sleep(5e-5)

    def answer(self, alive: Callable[[], None]) -> None:
        """The control socket's `Done` is the answer."""

    def close(self) -> None:
        abort = getattr(self.group, "abort", None) or self.group._abort
        abort()


class Slots:
    """A link's two staging buffers, `size` bytes and a trailer each, and what stands between them and the cache.

    On a GPU with gloo a payload passes through pinned host memory; with NCCL the buffers are on the device.
    """

    def __init__(self, size: int, device: str, transport: Transport) -> None:
        self.size = size
        on_gpu = torch.device(device).type == "cuda"
        self._packed = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)] if on_gpu else []
        place: dict[str, Any] = {"device": device} if transport == "nccl" else {"pin_memory": on_gpu}
        self._wire = [torch.zeros(size + TRAILER, dtype=torch.uint8, **place) for _ in range(2)]
        self._stream: torch.cuda.Stream | None = None
        if on_gpu:
            self._stream = torch.cuda.Stream(torch.device(device))  # type: ignore[no-untyped-call]

    def wire(self, number: int, size: int) -> torch.Tensor:
        """The buffer that travels for piece `number`."""
        return self._wire[number % 2][: size + TRAILER]

    def fill(self, number: int, size: int, pack: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Lets `pack` write the payload, adds the trailer, and returns the buffer to send."""
        buffer = self.wire(number, size)
        trailer = torch.tensor([number, _MAGIC], dtype=torch.int64).view(torch.uint8)
        if self._stream is None:
            pack(buffer[:size])
            buffer[size:] = trailer
            return buffer
        with torch.cuda.stream(self._stream):
            slab = self._packed[number % 2][:size]
            pack(slab)
            buffer[:size].copy_(slab, non_blocking=True)
            buffer[size:].copy_(trailer, non_blocking=True)
        self._stream.synchronize()
        return buffer

    def clear(self, number: int, size: int) -> torch.Tensor:
        """The buffer to receive into, its trailer wiped."""
        buffer = self.wire(number, size)
        if self._stream is None:
            buffer[size:] = 0
            return buffer
        with torch.cuda.stream(self._stream):
            buffer[size:] = 0
        self._stream.synchronize()
        return buffer

    def empty(self, number: int, size: int, unpack: Callable[[torch.Tensor], bool]) -> bool:
        """Checks the trailer and lets `unpack` read the payload; done with the buffer on return."""
        buffer = self.wire(number, size)
        if self._stream is None:
            self._check(buffer[size:], number)
            return unpack(buffer[:size])
        with torch.cuda.stream(self._stream):
            slab = self._packed[number % 2][:size]
            slab.copy_(buffer[:size], non_blocking=True)
            self._check(buffer[size:].cpu(), number)
            wanted = unpack(slab)
        self._stream.synchronize()
        return wanted

    @staticmethod
    def _check(trailer: torch.Tensor, number: int) -> None:
        found = trailer.clone().view(torch.int64).tolist()
        if found != [number, _MAGIC]:
            raise TransferCorrupt(f"Piece {number} ended in {found}: it did not arrive whole.")


def transport_for(device: str, wanted: str) -> Transport:
    """auto is NCCL on a GPU and gloo elsewhere."""
    if wanted == "auto":
        return "nccl" if torch.device(device).type == "cuda" else "gloo"
    if wanted == "nccl" and torch.device(device).type != "cuda":
        raise Internal("NCCL moves between GPUs only.")
    return "nccl" if wanted == "nccl" else "gloo"
