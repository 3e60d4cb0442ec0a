"""The ranks of one worker group and their collectives: gloo between CPUs, NCCL between GPUs.

No default world is made: the group is its own `ProcessGroup` on the first rank's store. Called by a rank's main thread
only, by all ranks in the same order. A rank that dies leaves the others in a wait, which the front ends: it sees the
death at once and kills the rest. One that lives and does not come ends the group too: at the group's limit or, where
NCCL knows none (while a communicator is made, in a replayed graph), at `limits.group_start` and `limits.step`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from diptych.contract.errors import Internal
from diptych.kernels.all_reduce import Peers, all_reduce


@dataclass
class Traffic:
    """What this rank sent to others: calls, and bytes by the least that any algorithm must send (a sum sends 2 (n-1)/n
    of its tensor, or all of it n-1 times where the others read it; a gather its own part n-1 times, an exchange what
    is not its own)."""

    calls: int = 0
    bytes: int = 0


class Group:
    """One rank's end. `rank` of `size`; every call blocks, or on a GPU is a kernel of the current stream, which a CUDA
    graph may capture (but for `exchange` and `least`, whose sizes and results are the host's).

    Tensors are contiguous, on the group's device; integers are as good as floats except for `sum`. peers: set where
    ranks read each other's memory (`symmetric.lend`); small sums then take one launch.
    """

    def __init__(self, backend: Any, rank: int, size: int, device: torch.device | str) -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.peers: Peers | None = None
        self.traffic = Traffic()
        self._backend = backend
        self._options = AllreduceOptions(), AllgatherOptions(), AllToAllOptions()
        for options in self._options:
            options.asyncOp = False  # NCCL then takes the current stream and not one of its own, with two events more

    def sum(self, x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        """Adds `x` up over all ranks, then `bias` and `residual`, in place, and returns it: the same bits at every
        rank."""
        if self.peers is not None and self.peers.takes(x):
            self._count((self.size - 1) * x.nbytes)
            return all_reduce(x, self.peers, bias, residual)
        if x.numel():
            self._count(2 * (self.size - 1) * x.nbytes // self.size)
            _finish(self._backend.allreduce([x], self._options[0]))
        if bias is not None:
            x += bias
        return x if residual is None else x.add_(residual)

    def check(self) -> None:
        """Raises `Internal` when a peer did not come to a sum."""
        if self.peers is not None:
            self.peers.check()

    def gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: every rank's `x`, all of one shape."""
        out = x.new_empty((self.size, *x.shape))
        if x.numel():
            self._count((self.size - 1) * x.nbytes)
            _finish(self._backend._allgather_base(out.view(-1), x.view(-1), self._options[1]))
        return out

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Sends the first send[0] rows of `x` to rank 0, the next send[1] to rank 1, …; returns what came, in the order
        of ranks. receive: how many rows each rank sends here."""
        out = x.new_empty((sum(receive), *x.shape[1:]))
        width = x[:1].numel() * x.element_size() if len(x) else 0
        self._count((len(x) - send[self.rank]) * width)
        _finish(self._backend.alltoall_base(out, x, list(receive), list(send), self._options[2]))
        return out

    def least(self, value: int) -> int:
        """The smallest of the ranks' values."""
        return int(self.gather(torch.tensor([value], device=self.device)).min())

    def warm(self) -> None:
        """Makes the connections of every kind of call: the first one takes up to a second, which no step should."""
        self.sum(torch.zeros(1, device=self.device))
        self.exchange(self.gather(torch.zeros(1, device=self.device)), [1] * self.size, [1] * self.size)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that what goes wrong does so here
        self.traffic = Traffic()

    def _count(self, size: int) -> None:
        self.traffic.calls += 1
        self.traffic.bytes += size


def _finish(work: Any) -> None:
    """gloo's calls return what is to be waited for; NCCL's are ordered on the current stream and return nothing."""
    if work is not None:
        work.wait()


class Groups(NamedTuple):
    """A rank's collectives. sharing: with the ranks that share its data rank, None where it is the only one; everyone:
    with all. The same one where there is one data rank."""

    sharing: Group | None = None
    everyone: Group | None = None


def join(
    transport: Literal["gloo", "nccl"],
    store: TCPStore,
    name: str,
    rank: int,
    size: int,
    host: str,
    device: str,
    limit: float,
) -> Group:
    """Joins the group of that name; every rank does the same within `limit` seconds. Raises `Internal` after it."""
    prefixed = PrefixStore(f"group/{name}", store)
    try:
        backend = (
            _nccl(prefixed, rank, size, limit) if transport == "nccl" else _gloo(prefixed, rank, size, host, limit)
        )
        group = Group(backend, rank, size, device)
        group.warm()
    except RuntimeError as error:
        raise Internal(f"The group of {size} ranks could not be made: {str(error).splitlines()[0]}") from error
    return group


def _gloo(store: PrefixStore, rank: int, size: int, host: str, limit: float) -> Any:
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=limit)
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(store: PrefixStore, rank: int, size: int, limit: float) -> Any:
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=limit)
    options.config.max_ctas = int(os.environ.get("NCCL_MAX_CTAS", "16"))
    return ProcessGroupNCCL(store, rank, size, options)
