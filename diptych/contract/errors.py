"""The one error tree.

    DiptychError
    ├── InvalidRequest      the client sent something that can never work
    ├── Unauthenticated     no valid token or secret
    ├── ModelUnsupported    an architecture, config key or weight file that we refuse
    ├── CapacityExceeded    no room: a full queue, or a request larger than any pool
    ├── DeadlineExceeded    its time ran out, wherever it was (the queue too)
    ├── Cancelled           the client left or asked for it
    ├── WorkerLost
    │   ├── PrefillLost     the prefill worker died or its stream broke
    │   └── DecodeLost      the decode worker died or its stream broke
    ├── TransferFailed
    │   ├── TransferTimeout the KV cache made no progress within its limit
    │   └── TransferCorrupt what arrived is not what was sent
    ├── LayoutMismatch      two workers disagree on what they must share
    ├── ConfigInvalid       a setting of ours is wrong; found before anything starts
    └── Internal            a bug of ours

Each has one gRPC status, one HTTP code and one sentence for the user. An error crosses a process boundary as
(`code`, `message`) and comes back as the same class through `from_wire`.
"""

from __future__ import annotations

from typing import ClassVar


class DiptychError(Exception):
    """Base of every error that a user may see. `str(error)` is one sentence that says what to do."""

    grpc: ClassVar[str] = "INTERNAL"
    http: ClassVar[int] = 500
    hint: ClassVar[str] = "Please report this with the request id."

    @property
    def code(self) -> str:
        """The class's own name: the stable, machine-readable code on every protocol."""
        return type(self).__name__


class InvalidRequest(DiptychError):
    """`field` names the offending parameter; the message repeats it."""

    grpc, http, hint = "INVALID_ARGUMENT", 400, "Correct the request and send it again."


class Unauthenticated(DiptychError):
    grpc, http, hint = "UNAUTHENTICATED", 401, "Send a valid token."


class ModelUnsupported(DiptychError):
    grpc, http, hint = "FAILED_PRECONDITION", 400, "Choose a supported model."


class CapacityExceeded(DiptychError):
    grpc, http, hint = "RESOURCE_EXHAUSTED", 429, "Try again later or send less."


class DeadlineExceeded(DiptychError):
    grpc, http, hint = "DEADLINE_EXCEEDED", 504, "Allow more time or send less."


class Cancelled(DiptychError):
    grpc, http, hint = "CANCELLED", 499, "Nothing to do."


class WorkerLost(DiptychError):
    grpc, http, hint = "UNAVAILABLE", 503, "Send the request again; the worker is being replaced."


class PrefillLost(WorkerLost):
    pass


class DecodeLost(WorkerLost):
    pass


class TransferFailed(DiptychError):
    grpc, http, hint = "UNAVAILABLE", 503, "Send the request again."


class TransferTimeout(TransferFailed):
    pass


class TransferCorrupt(TransferFailed):
    pass


class LayoutMismatch(DiptychError):
    grpc, http, hint = "FAILED_PRECONDITION", 500, "Start every worker with the same model, dtype and block size."


class ConfigInvalid(DiptychError):
    grpc, http, hint = "FAILED_PRECONDITION", 500, "Correct the configuration."


class Internal(DiptychError):
    pass


def _tree(root: type[DiptychError]) -> dict[str, type[DiptychError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


BY_CODE: dict[str, type[DiptychError]] = _tree(DiptychError)


def from_wire(code: str, message: str) -> DiptychError:
    """The error that another process sent as (code, message); an unknown code becomes `Internal`."""
    return BY_CODE.get(code, Internal)(message)
