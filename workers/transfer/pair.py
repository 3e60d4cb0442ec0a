"""The two-rank `torch.distributed` group that carries one link's payload: gloo between CPUs, NCCL between GPUs.

No default world is made. The receiver is rank 0 and its store makes the rendezvous, under a name used once.

A gloo peer that dies is noticed by a large message only at the group's timeout, but by a small one within milliseconds:
so a one-byte marker trails every payload and is waited for first, and the sender waits first for a one-byte answer.
Nothing local frees a blocked gloo wait; after any error the pair is thrown away.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from diptych.contract.errors import TransferFailed

PAYLOAD, MARKER, ANSWER = 1, 2, 3
RECEIVER, SENDER = 0, 1


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


class GlooPair:
    """One end of a pair on CPUs. Used by the link's own thread only; every wait ends within `limit` seconds.

    `send` and `receive` post, `finish` waits. Buffers stay the caller's and must not be touched in between.
    """

    transport = "gloo"

    def __init__(self, store: TCPStore, name: str, rank: int, host: str, limit: float) -> None:
        from torch.distributed import ProcessGroupGloo

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timedelta(seconds=limit)
        self.peer = 1 - rank
        try:
            self.group: Any = ProcessGroupGloo(PrefixStore(f"pair/{name}", store), rank, 2, options)
        except RuntimeError as error:
            raise TransferFailed(f"The two-rank group {name} could not be made: {error}") from error
        self._byte = torch.zeros(1, dtype=torch.uint8)

    def send(self, payload: torch.Tensor) -> list[Any]:
        """Posts the payload, its marker and the receive of the answer."""
        return [
            self.group.recv([torch.zeros(1, dtype=torch.uint8)], self.peer, ANSWER),
            self.group.send([payload], self.peer, PAYLOAD),
            self.group.send([self._byte], self.peer, MARKER),
        ]

    def receive(self, into: torch.Tensor) -> list[Any]:
        """Posts the receives of the marker and of the payload."""
        return [
            self.group.recv([torch.zeros(1, dtype=torch.uint8)], self.peer, MARKER),
            self.group.recv([into], self.peer, PAYLOAD),
        ]

    def finish(self, works: list[Any]) -> None:
        """Waits for posted work, the small message first. Raises `TransferFailed`; the pair is then unusable."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise TransferFailed(f"The two-rank group failed: {str(error).splitlines()[0]}") from error

    def answer(self) -> None:
        """Tells the sender that a payload arrived."""
        self.finish([self.group.send([self._byte], self.peer, ANSWER)])


def connect_store(address: tuple[str, int], limit: float) -> TCPStore:
    try:
        return TCPStore(
            address[0], address[1], is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit)
        )
    except RuntimeError as error:
        raise TransferFailed(f"The receiver's store at {address[0]}:{address[1]} did not answer: {error}") from error
