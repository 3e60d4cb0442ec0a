"""Links one of whose ends goes away, or says nothing more, when both have agreed to make their two-rank group: the
other end must be told in time. Real links over real sockets; on a GPU in a process of its own, as NCCL may keep a
thread."""

from __future__ import annotations

import queue
import socket
import threading
import time
import uuid
from typing import Any

from diptych.contract.limits import Limits
from diptych.contract.wire import WorkerInfo
from diptych.workers.cache import KVCache
from diptych.workers.parallel.group import Group
from diptych.workers.parallel.layout import Grid
from diptych.workers.transfer.control import Control, LinkHello, answer, knock
from diptych.workers.transfer.events import Event, LinkDown, LinkUp, PeerUp
from diptych.workers.transfer.landing import Landings
from diptych.workers.transfer.pair import host_store, transport_for
from diptych.workers.transfer.plan import Route, routes
from diptych.workers.transfer.receiver import Receiver
from diptych.workers.transfer.sender import SendLink

SECRET, EPOCH, DIGEST, HOST = b"a secret of these tests alone", "0", "digest", "127.0.0.1"
KV_HEADS = 2


def _cache(device: str) -> KVCache:
    return KVCache(1, 4, 16, KV_HEADS, 32, device=device)


def _route() -> Route:
    (route,) = routes(KV_HEADS, 1, 1)
    return route


def _receiver(device: str, limits: Limits, post: Any) -> Receiver:
    transport, layout = transport_for(device, "auto"), _cache("cpu").layout
    found = Receiver(
        SECRET, EPOCH, DIGEST, 0, Grid(), KV_HEADS, layout, Landings(), HOST, device, transport, limits, 1 << 16, post
    )
    found.start()
    return found


def _sender(device: str, limits: Limits, address: str, post: Any) -> SendLink:
    peer = WorkerInfo("decode", "decode", "", (address,), EPOCH, DIGEST, 0, (0,), 16, 4, 64)
    found = SendLink(
        peer, "prefill", SECRET, DIGEST, _cache(device), _route(), (0, 0), (Grid(), Grid()), address, HOST,
        transport_for(device, "auto"), limits, 1 << 16, post,
    )  # fmt: skip
    found.start()
    return found


def sender_goes(device: str, limits: Limits, silent: bool, another: bool = True) -> tuple[float, float]:
    """Seconds until the receiver's link ended, and those that another, sound sender then took."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    known = threading.enumerate()
    receiver = _receiver(device, limits, events.put)
    host, port = receiver.address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)))
    hello = LinkHello(uuid.uuid4().hex, "prefill", EPOCH, DIGEST, receiver.transport, uuid.uuid4().bytes)
    knock(Control(sock, limits.handshake), SECRET, hello)
    (link,) = (each for each in threading.enumerate() if each.name == "receive-link" and each not in known)
    begun = time.monotonic()
    if not silent:
        sock.close()
    link.join(60.0)
    assert not link.is_alive()
    took = time.monotonic() - begun
    sock.close()
    if not another:
        return took, 0.0
    begun = time.monotonic()
    _sender(device, Limits(), receiver.address, events.put)
    told = [events.get(timeout=60.0) for _ in range(2)]
    assert {type(event) for event in told} == {LinkUp, PeerUp}
    return took, time.monotonic() - begun


def goes_on_gpu(group: Group, side: str, silent: bool) -> tuple[float, str]:
    """For a process that ends afterwards: seconds, and the sender's error code."""
    limits = Limits(handshake=5.0 if silent else 60.0, progress=60.0)
    if side == "sender":
        return sender_goes("cuda:0", limits, silent, another=False)[0], ""
    return receiver_goes("cuda:0", limits, silent)


def receiver_goes(device: str, limits: Limits, silent: bool) -> tuple[float, str]:
    """Seconds until the sender's link ended, and the code of its error."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    store, address = host_store(HOST, limits.handshake)
    with socket.create_server((HOST, 0)) as listener:
        _sender(device, limits, f"{HOST}:{listener.getsockname()[1]}", events.put)
        sock, _ = listener.accept()
        answer(Control(sock, limits.handshake), SECRET, EPOCH, DIGEST, transport_for(device, "auto"), address)
        begun = time.monotonic()
        if not silent:
            sock.close()
        down = events.get(timeout=60.0)
        took = time.monotonic() - begun
        sock.close()
    assert isinstance(down, LinkDown)
    del store
    return took, down.failure.code
