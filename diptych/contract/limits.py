"""Every limit on a wait, in one table whose order is checked at start. Nothing in Diptych waits without one of these.

Seconds throughout. `Limits` is part of the configuration; tests shrink it so that each limit can be seen to fire.
"""

from __future__ import annotations

import msgspec

from diptych.contract.errors import ConfigInvalid


class Limits(msgspec.Struct, frozen=True):
    """heartbeat < registry_drop, lease; handshake, progress < group_start: see `check`.

    heartbeat: a worker's load message on each session, and the longest silence of an idle loop.
    lease: a session without a message for so long is broken, on both ends.
    register / registry_drop: how often a front renews its entry, and when an entry that was not renewed is dropped.
    handshake: making a link, challenge included. progress: one message of a transfer.
    step: an engine that completes no step for so long while it has work is dead.
    group_start: from a process's start to its `ready`. placement: a placement group.
    orphan: a worker whose registry is gone for so long ends itself. kill: from a group's end to its last process's.
    drain: a stopping server's streams. request: the default deadline; request_max: the largest a client may ask for.
    """

    heartbeat: float = 1.0
    lease: float = 10.0
    register: float = 2.0
    registry_drop: float = 10.0
    handshake: float = 10.0
    progress: float = 10.0
    step: float = 60.0
    group_start: float = 120.0
    placement: float = 60.0
    orphan: float = 60.0
    kill: float = 1.0
    drain: float = 10.0
    request: float = 600.0
    request_max: float = 3600.0

    def check(self) -> Limits:
        """Returns itself, or raises `ConfigInvalid` naming the pair that stands in the wrong order."""
        order = [
            ("heartbeat", "lease"),
            ("register", "registry_drop"),
            ("handshake", "group_start"),
            ("progress", "request_max"),
            ("registry_drop", "orphan"),
            ("request", "request_max"),
        ]
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigInvalid(f"limits.{name} must be above 0 s, not {getattr(self, name)}.")
        for small, large in order:
            if getattr(self, small) > getattr(self, large):
                values = f"limits.{small} ({getattr(self, small)} s) must not exceed limits.{large}"
                raise ConfigInvalid(f"{values} ({getattr(self, large)} s).")
        return self
