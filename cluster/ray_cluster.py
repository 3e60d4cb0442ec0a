"""Which Ray cluster a service runs on: one of its own, or one that exists.

Owns starting and stopping a cluster of our own and the place of its token; joins an existing one and never stops it.
A cluster of our own lives in a private folder with a short path (Unix sockets allow about 100 bytes) and takes a token
made for it alone: it needs no writable home and no other cluster's token, and nothing else finds it by accident.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import grpc
import ray
from ray.exceptions import AuthenticationError

from diptych.cluster.processes import alive, descendants
from diptych.cluster.ray_registry import NAMESPACE
from diptych.contract.errors import ConfigInvalid, Unauthenticated

TOKEN_PATH, MODE = "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"
ASK_LIMIT = 5.0  # seconds for a cluster to say whether it knows us
OBJECT_STORE_BYTES = 100 << 20  # requests and KV never enter it; Ray's own default is a third of the memory
STOP_LIMIT = 10.0  # seconds from shutdown to the last process of a cluster of our own


class RayCluster:
    """A connection to a cluster, `own` if it was started here. Use `connect`; call `stop` once. before: processes below
    this one that are not the cluster's, since they were there first."""

    def __init__(
        self,
        own: bool,
        address: str,
        folder: Path | None = None,
        token: str | None = None,
        before: Collection[int] = (),
    ) -> None:
        self.own = own
        self.address = address
        self.folder = folder
        self._token_before = token
        self._children_before = frozenset(before)

    def stop(self) -> None:
        """Leaves the cluster; ends it, waits for its last process and removes its folder if it is our own."""
        if not self.own:
            ray.shutdown()
            return
        members = self._members()
        ray.shutdown()
        _bury(members)
        _restore(self._token_before)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _members(self) -> list[int]:
        """Processes of a cluster of our own: all that came below this one since its start, but for what descends from
        its other children."""
        strangers = set(self._children_before)
        for pid in self._children_before:
            strangers.update(descendants(pid))
        return [pid for pid in descendants(os.getpid()) if pid not in strangers]


def connect(mode: str, cpus: float, gpus: float = 0.0) -> RayCluster:
    """`local`: a cluster of our own with `cpus` logical CPUs. `auto`: the one that Ray finds ($RAY_ADDRESS, or
    running on this machine), else as local. Otherwise the cluster at that HOST:PORT.

    Raises `ConfigInvalid` when none answers there and `Unauthenticated` without its token, each within seconds.
    """
    if mode == "local":
        return _start(cpus, gpus)
    if mode != "auto":
        return _join(mode)
    found = _found()
    return _join(found) if found else _start(cpus, gpus)


def _found() -> str | None:
    from ray._private.services import canonicalize_bootstrap_address

    with contextlib.suppress(ConnectionError):
        return canonicalize_bootstrap_address("auto")
    return None


def _start(cpus: float, gpus: float) -> RayCluster:
    folder = Path(tempfile.mkdtemp(prefix="diptych-", dir=_short_folder()))
    before = os.environ.get(TOKEN_PATH)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ[TOKEN_PATH] = str(token)
    _forget_token()
    strangers = descendants(os.getpid())
    try:
        context = _init(
            address="local",
            num_cpus=math.ceil(cpus),
            num_gpus=math.ceil(gpus) or None,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(folder / "ray"),
            include_dashboard=False,
        )
    except BaseException:
        _restore(before)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return RayCluster(True, context.address_info["gcs_address"], folder, before, strangers)


def _join(address: str) -> RayCluster:
    """Asks first: `ray.init` itself tries for twenty seconds with a wrong token, and for ever where nobody listens."""
    token = _token()
    answer = _ask(address, token)
    if answer is grpc.StatusCode.UNAUTHENTICATED:
        raise Unauthenticated(
            f"The Ray cluster at {address} refuses us without its token: set {TOKEN_PATH} to a file that holds it, "
            "or start a cluster of your own with --ray local."
        )
    if answer is not None:
        raise ConfigInvalid(f"No Ray cluster answers at {address} ({answer.name}); --ray local starts one.")
    if token and MODE not in os.environ:
        os.environ[MODE] = "token"  # Ray itself switches it on only where it found the cluster alone
    _forget_token()
    try:
        context = _init(address=address)
    except (AuthenticationError, ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigInvalid(f"Joining the Ray cluster at {address} failed: {str(error).splitlines()[0]}") from None
    return RayCluster(False, context.address_info["gcs_address"])


def _token() -> str:
    """The token that Ray itself would send, from the same places in the same order; empty if there is none."""
    if os.environ.get(MODE, "token").lower() != "token":
        return ""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip()
    path = Path(os.environ.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _ask(address: str, token: str) -> grpc.StatusCode | None:
    """None if a cluster answers there and takes the token, else why not."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(
            "/ray.rpc.NodeInfoGcsService/GetClusterId", request_serializer=None, response_deserializer=None
        )
        try:
            call(b"", metadata=metadata, timeout=ASK_LIMIT)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return None


def _init(**options: Any) -> Any:
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray puts the driver's current folder on every worker's import path: one that holds a clone would shadow the
    # installed package there.
    with contextlib.chdir(_short_folder()):
        return ray.init(
            namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False, configure_logging=False, **options
        )


def _short_folder() -> str:
    """The user's temporary folder if Ray's socket paths fit beside it, else /tmp."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 20 else "/tmp"


def _forget_token() -> None:
    """Ray reads mode and token once a process; this one may have used another cluster before."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _restore(token_path: str | None) -> None:
    if token_path is None:
        os.environ.pop(TOKEN_PATH, None)
    else:
        os.environ[TOKEN_PATH] = token_path
    _forget_token()


def _bury(pids: list[int]) -> None:
    """Waits for the processes that were ours when the cluster was shut down, then kills what is left, by pid."""
    limit = time.monotonic() + STOP_LIMIT
    while time.monotonic() < limit and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    for pid in pids:
        if alive(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
