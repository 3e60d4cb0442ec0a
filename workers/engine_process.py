"""An engine's process: `python -m diptych.workers.engine_process FD LINE…`, started by its front and by nothing else.

FD is the channel to the front. The group's first rank gets a line to each other rank, every other rank one to the
first. Loads its part of the model, allocates the cache, opens the link listener, says `Up`, and runs its loop until the
front is gone: the engine's at the first rank, a follower's at the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from diptych.contract.errors import ConfigInvalid, DiptychError, Internal
from diptych.contract.logs import log_to_stderr
from diptych.contract.wire import PROTOCOL
from diptych.workers.blocks import BlockPool
from diptych.workers.cache import KVCache, KVLayout
from diptych.workers.channel import EngineChannel, Fatal, Launch, Loading, Up
from diptych.workers.device_runner import DeviceRunner, rehearse
from diptych.workers.engine import Engine
from diptych.workers.handover import Handover
from diptych.workers.memory import cache_blocks, refuse_what_does_not_fit
from diptych.workers.model.calibration import unified_of
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import dtype_of, load
from diptych.workers.parallel.follow import Follower
from diptych.workers.parallel.group import Groups, join
from diptych.workers.parallel.layout import ExpertTable, Shard, kv_share, may_share_a_gpu, refuse_bad_layout
from diptych.workers.parallel.lead import Followers, LeadingRunner
from diptych.workers.parallel.orders import Join, Line
from diptych.workers.parallel.symmetric import lend
from diptych.workers.runner import Runner
from diptych.workers.sampler import Sampler
from diptych.workers.settings import WorkerSettings
from diptych.workers.transfer.events import Event
from diptych.workers.transfer.links import Links
from diptych.workers.transfer.pair import connect_store, host_store, transport_for

SAMPLES = 64  # pieces of 4 KiB that the digest reads of each weight file


def main() -> int:
    _die_with_parent()
    log_to_stderr()
    # A group ends by its front's word; Ctrl-C in a terminal reaches every process and must not tear streams.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    own, *others = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    channel = EngineChannel(own)
    try:
        _serve(channel, [Line(other) for other in others])
    except EOFError:
        return 0
    except DiptychError as error:
        _last_words(channel, error)
        return 1
    except Exception as error:
        logging.getLogger("diptych.engine").exception("the engine failed")
        _last_words(channel, Internal(f"The engine failed: {error!r}"))
        return 1
    return 0


def _serve(channel: EngineChannel, lines: list[Line]) -> None:
    launch = channel.first()
    torch.set_num_threads(launch.settings.threads)
    # A link's thread must get the interpreter within a fraction of a step.
    sys.setswitchinterval(1e-4)
    loop: Engine | Follower
    loop, up = build(launch, channel, lines) if launch.rank == 0 else build_follower(launch, channel, lines[0])
    # What was made until here lives as long as the process: collections must not walk it between two steps.
    gc.collect()
    gc.freeze()
    channel.send(up)
    loop.run()


@dataclass(frozen=True)
class Rank:
    """What every rank is made of."""

    settings: WorkerSettings
    config: ModelConfig
    context: int
    blocks: int
    digest: str
    runner: Runner

    def up(self, address: str, transport: str) -> Up:
        return Up(
            link=address,
            digest=self.digest,
            block_size=self.settings.block_size,
            total_blocks=self.blocks,
            max_context=self.context,
            pid=os.getpid(),
            device=self.settings.device,
            transport=transport,
        )

    def links(self, launch: Launch, report: Callable[[Event], None]) -> Links:
        return Links(
            self.settings,
            launch.id,
            launch.epoch,
            launch.secret,
            self.digest,
            launch.rank,
            self.config.kv_heads,
            self.runner.cache,
            report,
        )


def build(launch: Launch, channel: EngineChannel, lines: Sequence[Line] = ()) -> tuple[Engine, Up]:
    """The first rank: everything an engine is made of, from the model's folder to the listener."""
    settings, groups = launch.settings, Groups()
    followers = Followers(lines, settings.grid, settings.limits.step)
    if lines:
        store, address = host_store(settings.host, settings.limits.group_start)
        followers.order(Join(*address))
        groups = _join(launch, store)
    rank = build_rank(launch, channel, groups)
    pools = [BlockPool(rank.blocks, settings.block_size, settings.prefix_cache) for _ in range(settings.data)]
    handover = Handover(
        rank.settings,
        rank.config.kv_heads,
        pools,
        followers,
        channel.wake,
        lambda report: rank.links(launch, report),
    )
    for number in range(1, settings.grid.ranks):
        followers.listen(number, handover.post)
    runner = LeadingRunner(rank.runner, followers) if lines else rank.runner
    engine = Engine(rank.settings, runner, pools, channel, handover)
    return engine, rank.up(handover.address, handover.transport)


def build_follower(launch: Launch, channel: EngineChannel, line: Line) -> tuple[Follower, Up]:
    """Any other rank."""
    first = line.order()
    if not isinstance(first, Join):
        raise Internal(f"{type(first).__name__} came before Join.")
    store = connect_store((first.store_host, first.store_port), launch.settings.limits.group_start)
    rank = build_rank(launch, channel, _join(launch, store))
    links = rank.links(launch, line.report)
    data_rank, place = launch.settings.grid.place(launch.rank)
    follower = Follower(rank.runner, line, links, answers=data_rank > 0 and place == 0)
    return follower, rank.up(links.address, links.transport)


def _join(launch: Launch, store: TCPStore) -> Groups:
    settings, grid = launch.settings, launch.settings.grid
    device = _device(settings, launch.rank)
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    transport = transport_for(device, settings.transport)
    limit = settings.limits.group_start
    everyone = join(transport, store, launch.epoch, launch.rank, grid.ranks, settings.host, device, limit)
    if grid.tensor == 1:
        return Groups(None, everyone)
    data_rank, place = grid.place(launch.rank)
    name = f"{launch.epoch}/{data_rank}"
    sharing = everyone
    if grid.data > 1:
        sharing = join(transport, store, name, place, grid.tensor, settings.host, device, limit)
    if transport == "nccl":
        lend(sharing, store, name, settings.limits.step)
    return Groups(sharing, everyone)


def _device(settings: WorkerSettings, rank: int) -> str:
    """The rank's own device: ranks take neighbouring GPUs, from the one that is set."""
    device = torch.device(settings.device)
    if device.type != "cuda":
        return settings.device
    index, count = (device.index or 0) + rank, torch.cuda.device_count()
    if index >= count and may_share_a_gpu():
        index = device.index or 0  # ranks that share a GPU, for tests on a host that has one
    if index >= count:
        raise ConfigInvalid(f"Rank {rank} of {settings.grid.text} needs GPU {index}, and this host has {count}.")
    return f"cuda:{index}"


def build_rank(launch: Launch, channel: EngineChannel, groups: Groups) -> Rank:
    """Loads what this rank holds, and gives its cache as many blocks as every rank has room for."""
    settings = msgspec.structs.replace(launch.settings, device=_device(launch.settings, launch.rank))
    config = ModelConfig.from_folder(settings.model)
    shard = _shard(settings, config, launch.rank)
    dtype = dtype_of(settings.dtype, config, settings.device)
    context = settings.context(config.max_positions)
    name, kv_heads = str(dtype).removeprefix("torch."), len(kv_share(config.kv_heads, shard.rank, shard.ranks))
    layout = KVLayout(config.layers, kv_heads, config.head_dim, settings.block_size, name)
    on_gpu = torch.device(settings.device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(settings.device)
        refuse_what_does_not_fit(settings, config, dtype, shard)

    unified = None if settings.softmax == "running" else unified_of(settings.model, dtype, settings.device)

    def progress(done: int, total: int) -> None:
        channel.send(Loading("weights", done, total))

    def captured(done: int, total: int) -> None:
        channel.send(Loading("graphs", done, total))

    weights = load(settings.model, config, dtype, settings.device, settings.load_format, progress, shard)
    decoder = Decoder(
        config, weights, groups.sharing, shard, max_positions=context, everyone=groups.everyone,
        batch_invariant=settings.batch_invariant, unified=unified,
    )  # fmt: skip
    sampler = Sampler(config.vocab, settings.device)
    blocks = cache_blocks(
        settings, layout, (lambda: rehearse(decoder, sampler, layout, settings, context)) if on_gpu else None
    )
    if groups.everyone is not None:
        blocks = groups.everyone.least(blocks)
    if settings.overlap == 1 or (settings.overlap == -1 and on_gpu):
        cache = KVCache.of(layout, blocks + 1, settings.device)
        # Spread experts tell each other counts on the host in the middle of a step, which no graph can hold.
        graphs = settings.graphs and settings.role != "prefill" and shard.experts is None
        runner: Runner = DeviceRunner(decoder, cache, sampler, settings.max_batch, context, graphs, captured)
    else:
        runner = Runner(decoder, KVCache.of(layout, blocks, settings.device), sampler)
    whole = msgspec.structs.replace(layout, kv_heads=config.kv_heads)
    return Rank(settings, config, context, blocks, model_digest(settings, whole), runner)


def _shard(settings: WorkerSettings, config: ModelConfig, rank: int) -> Shard:
    sizes, grid = config.sizes, settings.grid
    refuse_bad_layout(sizes, grid, settings.spread_experts, settings.name or settings.role)
    spread = settings.spread_experts and config.moe is not None and grid.ranks > 1
    table = ExpertTable.even(sizes.experts, grid.ranks) if spread else None
    data_rank, place = grid.place(rank)
    return Shard(place, grid.tensor, table, data_rank)


def model_digest(settings: WorkerSettings, layout: KVLayout) -> str:
    """Of all that prefill and decode must agree on: the model's configuration, which tensors its files hold, the
    cache's layout (of the whole model: groups may divide it differently), the protocol, and a sample of the weights, so
    that two fine-tunes of one model do not pair up."""
    digest = hashlib.blake2b(digest_size=16)
    folder = Path(settings.model)
    digest.update((folder / "config.json").read_bytes())
    digest.update(f"{layout}|{PROTOCOL}|{settings.load_format}".encode())
    for path in sorted(folder.glob("*.safetensors")) if settings.load_format != "dummy" else ():
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            total = path.stat().st_size
            digest.update(f"{path.name}|{total}".encode())
            digest.update(file.read(min(size, 1 << 24)))
            for part in range(SAMPLES):
                file.seek(8 + size + (total - 8 - size) * part // SAMPLES)
                digest.update(file.read(4096))
    return digest.hexdigest()


def _last_words(channel: EngineChannel, error: DiptychError) -> None:
    with contextlib.suppress(OSError):  # the front is gone too: nobody is left to tell
        channel.send(Fatal(error.code, str(error)))


def _die_with_parent() -> None:
    """The kernel kills this process when its front dies, even while a rank is stuck in a wait that nothing ends."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    # Nothing is left to tidy up, and to try could hang: NCCL's end waits for the graphs that captured its calls.
    os._exit(main())
