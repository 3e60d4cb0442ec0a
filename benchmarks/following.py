"""What it costs that other ranks follow: from the first rank's order until every rank has answered, without compute.

The real orders, lines and collectives; the runner in the middle only answers, with a sum over one number. With --data
the ranks are data ranks, which divide the rows and answer with what they drew. Prints a table for people, then one JSON
line.

    python benchmarks/following.py [--ranks 2] [--data] [--rows 1 8 64]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
import time
from typing import Any

import torch

from diptych.contract.request import Key, Request, Sampling, Stopping
from diptych.workers.parallel.follow import Follower
from diptych.workers.parallel.group import Group, join
from diptych.workers.parallel.layout import Grid
from diptych.workers.parallel.lead import Followers, LeadingRunner
from diptych.workers.parallel.orders import Line
from diptych.workers.runner import Drawn, Launch
from diptych.workers.scheduler import Row, Step
from diptych.workers.sequence import Sequence
from diptych.workers.transfer.pair import connect_store, host_store

BLOCK = 16


class Answering:
    """In a runner's place: every rank meets in one sum, and draws a 7 for each row."""

    overlap, block_size, cache, softmax_counts = 0, BLOCK, None, None

    def __init__(self, group: Group) -> None:
        self.group = self.decoder = group
        self.one = torch.ones(1)

    def launch(self, step: Step) -> Launch:
        self.group.sum(self.one)
        return Launch(step, [Drawn(7, None) for _ in step.rows], {}, 0, 0)


def follow(sock: socket.socket, address: tuple[str, int], rank: int, size: int, answers: bool) -> None:
    torch.set_num_threads(1)
    group = join("gloo", connect_store(address, 30.0), "g", rank, size, "127.0.0.1", "cpu", 30.0)
    runner: Any = Answering(group)
    none: Any = None
    Follower(runner, Line(sock), none, answers).run()


def measure(size: int, data: bool, rows: int, steps: int) -> list[float]:
    """Microseconds of each step of `rows` sequences."""
    store, address = host_store("127.0.0.1", 30.0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diptych.workers.parallel.follow"])
    lines, members = [], []
    for rank in range(1, size):
        ours, theirs = socket.socketpair()
        member = context.Process(target=follow, args=(theirs, address, rank, size, data), daemon=True)
        member.start()
        theirs.close()
        lines.append(Line(ours))
        members.append(member)
    torch.set_num_threads(1)
    group = join("gloo", store, "g", 0, size, "127.0.0.1", "cpu", 30.0)
    inner: Any = Answering(group)
    followers = Followers(lines, Grid(size, 1) if data else Grid(1, size))
    for rank in range(1, size):
        followers.listen(rank, lambda event: None)
    found = _steps(LeadingRunner(inner, followers), rows, steps, size if data else 1)
    for line in lines:
        line.sock.shutdown(socket.SHUT_RDWR)
    for member in members:
        member.join(10.0)
    return found


def _steps(runner: LeadingRunner, rows: int, steps: int, data_ranks: int) -> list[float]:
    prompt = tuple(range(1000))
    made = [Request(Key(str(n)), prompt, Stopping(steps), Sampling(temperature=0.0)) for n in range(rows)]
    running = [Sequence(request, "s", BLOCK, hashed=False) for request in made]
    for index, seq in enumerate(running):
        seq.data_rank = index * data_ranks // rows
    found = []
    for number in range(steps):
        at = len(prompt) + number
        for index, seq in enumerate(running):
            if number == 0 or at % BLOCK == 0:
                seq.blocks += range(index, index + (at // BLOCK + 1 - len(seq.blocks)))
        step = Step(number, tuple(Row(seq, at - 1, 1, True) for seq in running))
        begun = time.perf_counter_ns()
        launch = runner.launch(step).result()
        found.append((time.perf_counter_ns() - begun) / 1e3)
        for seq, drawn in zip(running, launch.drawn, strict=True):
            seq.tokens.append(drawn.token)
    return found[steps // 10 :]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--data", action="store_true", help="data ranks, in place of ranks that share one")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=2000)
    asked = parser.parse_args()
    results = {}
    print(f"{asked.ranks} {'data ' if asked.data else ''}ranks, µs a step: message, wait, answer")
    for rows in asked.rows:
        found = sorted(measure(asked.ranks, asked.data, rows, asked.steps))
        p50, p99 = statistics.median(found), found[int(len(found) * 0.99)]
        print(f"  {rows:3d} rows   p50 {p50:7.1f}   p99 {p99:7.1f}")
        results[rows] = {"p50_us": round(p50, 1), "p99_us": round(p99, 1)}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    facts = {"commit": commit, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    print(json.dumps({"benchmark": "following", "ranks": asked.ranks, "data": asked.data, "rows": results, **facts}))


if __name__ == "__main__":
    main()
