"""What a router needs to know to start; filled by the command line or the Serve application, frozen from then on."""

from __future__ import annotations

import msgspec

from diptych.contract.limits import Limits


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """host, port: of the public gRPC server; port 0 picks a free one. share_port: several routers of one launcher
    listen on one port, and the launcher itself makes sure that nobody else does.

    model_name: what clients call the model; the folder's name if empty. max_active: requests held at once. max_queue:
    choices that may wait for a worker. max_message_bytes: the largest message a client may send. max_choices: `n`.
    threads: of the executor for templates and tokenising. max_preparing: requests that may wait for it.
    """

    host: str = "127.0.0.1"
    port: int = 0
    share_port: bool = False
    model_name: str = ""
    max_active: int = 4096
    max_queue: int = 1024
    max_message_bytes: int = 4 << 20
    max_choices: int = 16
    threads: int = 2
    max_preparing: int = 256
    limits: Limits = Limits()
