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
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from diptych.cluster.processes import alive, descendants
from diptych.cluster.ray_registry import NAMESPACE
from diptych.contract.errors import ConfigInvalid, DiptychError, Unauthenticated

TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
OBJECT_STORE_BYTES = 100 << 20  # requests and KV never enter it; Ray's own default is a third of the memory
STOP_LIMIT = 10.0  # seconds from shutdown to the last process of a cluster of our own


class RayCluster:
    """A connection to a cluster, `own` if it was started here. Use `connect`; call `stop` once."""

    def __init__(self, own: bool, address: str, folder: Path | None = None, token: str | None = None) -> None:
        self.own = own
        self.address = address
        self.folder = folder
        self._token_before = token

    def stop(self) -> None:
        """Leaves the cluster; ends it, waits for its last process and removes its folder if it is our own."""
        if not self.own:
            ray.shutdown()
            return
        members = descendants(os.getpid())
        ray.shutdown()
        _bury(members)
        _restore(self._token_before)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def connect(mode: str, cpus: float, gpus: float = 0.0) -> RayCluster:
    """`local`: a cluster of our own with `cpus` logical CPUs. `auto`: the one that is found, else as local. Otherwise
    the cluster at that address. Raises `ConfigInvalid` or `Unauthenticated` with one sentence."""
    if mode == "local":
        return _start(cpus, gpus)
    if mode != "auto":
        return _join(mode)
    try:
        return _join("auto")
    except _NoCluster:
        return _start(cpus, gpus)


class _NoCluster(DiptychError):
    """Nothing answers where a cluster was looked for."""


def _start(cpus: float, gpus: float) -> RayCluster:
    folder = Path(tempfile.mkdtemp(prefix="diptych-", dir=_short_folder()))
    before = os.environ.get(TOKEN_PATH)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    os.environ[TOKEN_PATH] = str(token)
    _forget_token()
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
    return RayCluster(True, context.address_info["gcs_address"], folder, before)


def _join(address: str) -> RayCluster:
    where = "the Ray cluster that was found" if address == "auto" else f"the Ray cluster at {address}"
    try:
        context = _init(address=address)
    except AuthenticationError:
        raise Unauthenticated(
            f"Joining {where} needs its token: set RAY_AUTH_TOKEN_PATH to a file that holds it, "
            "or start a cluster of your own with --ray local."
        ) from None
    except (ConnectionError, TimeoutError) as error:
        if address == "auto" and "RAY_ADDRESS" not in os.environ:
            raise _NoCluster(str(error)) from None
        raise ConfigInvalid(f"No Ray cluster answers at {_named(address)}; --ray local starts one.") from None
    except (RuntimeError, ValueError) as error:
        raise ConfigInvalid(f"Joining {where} failed: {str(error).strip().splitlines()[0]}") from None
    return RayCluster(False, context.address_info["gcs_address"])


def _init(**options: Any) -> Any:
    return ray.init(
        namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False, configure_logging=False, **options
    )


def _named(address: str) -> str:
    return os.environ.get("RAY_ADDRESS", address) if address == "auto" else address


def _short_folder() -> str:
    """The user's temporary folder if Ray's socket paths fit beside it, else /tmp."""
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 20 else "/tmp"


def _forget_token() -> None:
    """Ray reads a token once a process; this one may have used another cluster before."""
    from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

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
