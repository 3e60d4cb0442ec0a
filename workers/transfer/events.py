"""What link threads report, as plain data: it stays in the rank's own process or travels to the group's first rank.

A link is named by its two workers and by the ranks at its ends, counted over all data ranks of a worker: `source` at
prefill, `target` at decode.
"""

from __future__ import annotations

import msgspec

from diptych.contract.errors import DiptychError, from_wire
from diptych.contract.request import Key
from diptych.workers.parallel.layout import Grid


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An error that can travel."""

    code: str
    message: str

    @classmethod
    def of(cls, error: DiptychError) -> Failure:
        return cls(error.code, str(error))

    @property
    def error(self) -> DiptychError:
        return from_wire(self.code, self.message)


class Stats(msgspec.Struct, array_like=True):
    """Of one request's transfer over one link, by one end's clock, in ns. wire: union of the intervals in which a
    payload was under way (two may overlap), so bytes over it is a true rate. copy: packing, or unpacking. wait: for the
    receiver's slot."""

    bytes: int = 0
    messages: int = 0
    first_ns: int = 0
    last_ns: int = 0
    copy_ns: int = 0
    wait_ns: int = 0
    wire_ns: int = 0
    busy_until: int = 0

    def wire(self, start: int, end: int) -> None:
        self.wire_ns += max(0, end - max(start, self.busy_until))
        self.busy_until = max(self.busy_until, end)

    def join(self, other: Stats) -> None:
        """Adds a transfer of the same request over another link: what ran side by side counts its sum, and the whole
        its first start and last end."""
        starts = [first for first in (self.first_ns, other.first_ns) if first]
        self.first_ns = min(starts, default=0)
        self.last_ns = max(self.last_ns, other.last_ns)
        for name in ("bytes", "messages", "copy_ns", "wait_ns", "wire_ns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class LinkUp(msgspec.Struct, frozen=True, tag=True):
    """At prefill: a link to a decode worker's rank is ready."""

    peer: str
    source: int
    target: int


class LinkDown(msgspec.Struct, frozen=True, tag=True):
    """At prefill: the link is gone with all it had open; `SendClosed` came for each request before."""

    peer: str
    source: int
    target: int
    failure: Failure


class SendClosed(msgspec.Struct, frozen=True, tag=True):
    """At prefill: a request's transfer over one link has ended, and its thread reads the blocks no more. failure: None
    when decode accepted it."""

    key: Key
    source: int
    target: int
    failure: Failure | None
    stats: Stats


class PeerUp(msgspec.Struct, frozen=True, tag=True):
    """At decode: a link from rank `source` of a prefill worker, whose ranks are `sources`, is ready."""

    peer: str
    source: int
    sources: Grid
    target: int


class PeerDown(msgspec.Struct, frozen=True, tag=True):
    """At decode: the link is gone; requests whose KV it owed will not get it."""

    peer: str
    source: int
    target: int
    failure: Failure


class Arrived(msgspec.Struct, frozen=True, tag=True):
    """At decode: all KV of a request that this rank holds is in its blocks, checked and complete."""

    key: Key
    target: int
    first_token: int
    stats: Stats


class Begun(msgspec.Struct, frozen=True, tag=True):
    """At decode, of data ranks other than the first: the first KV of a request has come to this rank."""

    key: Key
    target: int


class Forsaken(msgspec.Struct, frozen=True, tag=True):
    """At decode: a sender gave a request up, or what came was not what was due."""

    key: Key
    failure: Failure


Event = LinkUp | LinkDown | SendClosed | PeerUp | PeerDown | Begun | Arrived | Forsaken
