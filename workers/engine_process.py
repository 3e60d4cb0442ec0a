"""An engine's process: `python -m diptych.workers.engine_process FD`, started by its front and by nothing else.

Loads the model, allocates the cache, opens the link listener, says `Up`, and runs the loop until the front is gone.
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
from pathlib import Path

import msgspec
import torch

from diptych.contract.errors import DiptychError, Internal
from diptych.contract.wire import PROTOCOL
from diptych.workers.blocks import BlockPool
from diptych.workers.cache import KVCache, KVLayout
from diptych.workers.channel import EngineChannel, Fatal, Launch, Loading, Up
from diptych.workers.device_runner import DeviceRunner, rehearse
from diptych.workers.engine import Engine
from diptych.workers.handover import Handover
from diptych.workers.memory import cache_blocks, refuse_what_does_not_fit
from diptych.workers.model.config import ModelConfig
from diptych.workers.model.decoder import Decoder
from diptych.workers.model.loader import dtype_of, load
from diptych.workers.runner import Runner
from diptych.workers.sampler import Sampler
from diptych.workers.settings import WorkerSettings

SAMPLES = 64  # pieces of 4 KiB that the digest reads of each weight file


def main() -> int:
    _die_with_parent()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # A group ends by its front's word; Ctrl-C in a terminal reaches every process and must not tear streams.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = EngineChannel(socket.socket(fileno=int(sys.argv[1])))
    try:
        _serve(channel)
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


def _serve(channel: EngineChannel) -> None:
    launch = channel.first()
    settings = launch.settings
    torch.set_num_threads(settings.threads)
    # A link's thread must get the interpreter within a fraction of a step.
    sys.setswitchinterval(1e-4)
    engine, up = build(launch, channel)
    # What was made until here lives as long as the process: collections must not walk it between two steps.
    gc.collect()
    gc.freeze()
    channel.send(up)
    engine.run()


def build(launch: Launch, channel: EngineChannel) -> tuple[Engine, Up]:
    """Everything an engine is made of, from the model's folder to the listener."""
    settings = launch.settings
    if settings.device == "cuda":
        settings = msgspec.structs.replace(settings, device="cuda:0")
    config = ModelConfig.from_folder(settings.model)
    dtype = dtype_of(settings.dtype, config, settings.device)
    context = min(settings.max_context or config.max_positions, config.max_positions)
    layout = KVLayout(
        config.layers, config.kv_heads, config.head_dim, settings.block_size, str(dtype).removeprefix("torch.")
    )
    on_gpu = torch.device(settings.device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(settings.device)
        refuse_what_does_not_fit(settings, config, dtype)

    def progress(done: int, total: int) -> None:
        channel.send(Loading(done, total))

    weights = load(settings.model, config, dtype, settings.device, settings.load_format, progress)
    decoder = Decoder(config, weights, max_positions=context)
    sampler = Sampler(config.vocab, settings.device)
    blocks = cache_blocks(settings, layout, (lambda: rehearse(decoder, layout, settings, context)) if on_gpu else None)
    if settings.overlap == 1 or (settings.overlap == -1 and on_gpu):
        cache = KVCache.of(layout, blocks + 1, settings.device)
        graphs = settings.graphs and settings.role != "prefill"
        runner: Runner = DeviceRunner(decoder, cache, sampler, settings.max_batch, context, graphs)
    else:
        runner = Runner(decoder, KVCache.of(layout, blocks, settings.device), sampler)
    pool = BlockPool(blocks, settings.block_size, settings.prefix_cache)
    digest = model_digest(settings, layout)
    handover = Handover(settings, launch.id, launch.epoch, launch.secret, digest, pool, runner.cache, channel.wake)
    engine = Engine(settings, runner, pool, channel, handover)
    up = Up(
        link=handover.receiver.address if handover.receiver else "",
        digest=digest,
        block_size=settings.block_size,
        total_blocks=blocks,
        max_context=context,
        pid=os.getpid(),
        device=settings.device,
        transport=handover.transport,
    )
    return engine, up


def model_digest(settings: WorkerSettings, layout: KVLayout) -> str:
    """Of all that prefill and decode must agree on: the model's configuration, which tensors its files hold, the
    cache's layout, the protocol, and a sample of the weights, so that two fine-tunes of one model do not pair up."""
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
    sys.exit(main())
