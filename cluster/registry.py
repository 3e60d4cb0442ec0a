"""Membership without Ray: a small server on the loopback network, and its client.

Owns the authentication of its calls: every request and every reply carries an HMAC under the service's secret, bound to
the method, a nonce and the time, so that neither can be forged, replayed or taken for another's. The wire is plaintext:
nothing in the table is secret. Which workers are alive is decided in `table.py`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Awaitable, Callable

import grpc
import msgspec

from diptych.cluster.table import WorkerTable
from diptych.contract.errors import Internal
from diptych.contract.limits import Limits
from diptych.contract.registry import Table
from diptych.contract.wire import WorkerInfo

SERVICE = "diptych.internal.v1.Registry"
WINDOW = 60.0  # seconds that a request's wall time may differ from the server's; nonces are remembered for as long


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    """One message: `mac` is over (direction, method, nonce, time, body)."""

    nonce: bytes
    time: float
    body: bytes
    mac: bytes


_encoder = msgspec.msgpack.Encoder()
_sealed = msgspec.msgpack.Decoder(_Sealed)
_info = msgspec.msgpack.Decoder(WorkerInfo)
_table = msgspec.msgpack.Decoder(Table)


def _mac(secret: bytes, direction: str, method: str, nonce: bytes, at: float, body: bytes) -> bytes:
    head = f"diptych-registry|{direction}|{method}|{at!r}|{len(nonce)}|".encode()
    return hmac.new(secret, head + nonce + body, hashlib.sha256).digest()


def _seal(secret: bytes, direction: str, method: str, nonce: bytes, body: bytes) -> bytes:
    at = time.time()
    return _encoder.encode(_Sealed(nonce, at, body, _mac(secret, direction, method, nonce, at, body)))


class _Guard:
    """Opens sealed requests: refuses a wrong mac, a time outside the window and a nonce seen before."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._seen: dict[bytes, float] = {}

    def open(self, method: str, data: bytes) -> _Sealed | None:
        try:
            sealed = _sealed.decode(data)
        except msgspec.DecodeError:
            return None
        expected = _mac(self._secret, "request", method, sealed.nonce, sealed.time, sealed.body)
        now = time.time()
        if not hmac.compare_digest(expected, sealed.mac) or abs(now - sealed.time) > WINDOW:
            return None
        self._forget(now)
        if sealed.nonce in self._seen:
            return None
        self._seen[sealed.nonce] = now
        return sealed

    def _forget(self, now: float) -> None:
        """Entries are in the order of arrival, so the old ones come first."""
        while self._seen:
            oldest = next(iter(self._seen))
            if now - self._seen[oldest] <= 2 * WINDOW:
                return
            del self._seen[oldest]


class RegistryServer:
    """The table's owner in a service without Ray. `start` binds and returns the address; `stop` ends it."""

    def __init__(self, secret: bytes, limits: Limits, host: str = "127.0.0.1") -> None:
        self._secret = secret
        self._host = host
        self._guard = _Guard(secret)
        self._rows = WorkerTable(limits.registry_drop)
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self) -> str:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        methods = {"Renew": self._renew, "Remove": self._remove, "Table": self._read}
        handlers = {name: grpc.unary_unary_rpc_method_handler(self._guarded(name, do)) for name, do in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = server.add_insecure_port(f"{self._host}:0")
        await server.start()
        self._server = server
        self.address = f"{self._host}:{port}"
        return self.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=0)

    def remove(self, worker_id: str) -> None:
        """Drops an entry, called in this process."""
        self._rows.remove(worker_id, time.monotonic())

    def table(self) -> Table:
        """The table as a caller in this process sees it."""
        return self._rows.table(time.monotonic())

    def _guarded(
        self, method: str, do: Callable[[bytes], bytes]
    ) -> Callable[[bytes, grpc.aio.ServicerContext[bytes, bytes]], Awaitable[bytes]]:
        async def handle(data: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            sealed = self._guard.open(method, data)
            if sealed is None:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "This registry does not know the caller.")
            try:
                body = do(sealed.body)
            except msgspec.DecodeError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{method}: {error}")
            return _seal(self._secret, "reply", method, sealed.nonce, body)

        return handle

    def _renew(self, body: bytes) -> bytes:
        self._rows.renew(_info.decode(body), time.monotonic())
        return b""

    def _remove(self, body: bytes) -> bytes:
        self._rows.remove(body.decode(errors="replace"), time.monotonic())
        return b""

    def _read(self, body: bytes) -> bytes:
        return _encoder.encode(self.table())


class RegistryClient:
    """`Registry` over a `RegistryServer`. Made and used in one event loop; connects by itself, again and again.

    limit: seconds a call may take before it fails with `Internal`.
    """

    def __init__(self, address: str, secret: bytes, limit: float = 1.5) -> None:
        self.address = address
        self._secret = secret
        self._limit = limit
        self._channel: grpc.aio.Channel | None = None

    async def renew(self, info: WorkerInfo) -> None:
        await self._call("Renew", _encoder.encode(info))

    async def remove(self, worker_id: str) -> None:
        await self._call("Remove", worker_id.encode())

    async def table(self) -> Table:
        return _table.decode(await self._call("Table", b""))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close(grace=None)

    async def _call(self, method: str, body: bytes) -> bytes:
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)])
        nonce = os.urandom(16)
        call = self._channel.unary_unary(f"/{SERVICE}/{method}", request_serializer=None, response_deserializer=None)
        try:
            data: bytes = await call(_seal(self._secret, "request", method, nonce, body), timeout=self._limit)
        except grpc.aio.AioRpcError as error:
            raise Internal(f"The registry at {self.address} does not answer: {error.details()}.") from None
        return self._opened(method, nonce, data)

    def _opened(self, method: str, nonce: bytes, data: bytes) -> bytes:
        sealed = _sealed.decode(data)
        expected = _mac(self._secret, "reply", method, nonce, sealed.time, sealed.body)
        if not hmac.compare_digest(expected, sealed.mac):
            raise Internal(f"The registry at {self.address} did not prove that it knows the secret.")
        return sealed.body
