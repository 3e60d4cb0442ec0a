"""The engine: one process a rank, one loop of three verbs, schedule → execute → commit.

Owns every sequence's part at this worker, and lets each end in exactly one `Ended`. Its main thread alone touches pool,
scheduler and model; link threads post events. There is no asyncio here: the interpreter's switching between threads
costs more than a step on a GPU takes.

Prefill and decode are two policies of this one engine: which messages a sequence came with decides, not the role.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence as Seq
from time import monotonic_ns

import msgspec

from diptych.contract import telemetry
from diptych.contract.errors import Cancelled, CapacityExceeded, DeadlineExceeded, DiptychError, Internal
from diptych.contract.request import Key, Request
from diptych.contract.wire import (
    Cancel,
    Ended,
    Generate,
    Granted,
    Load,
    Prefill,
    Reserve,
    Stage,
    Start,
    TokenOut,
    pack,
    to_worker,
)
from diptych.contract.wire import Step as StepMessage
from diptych.workers.blocks import BlockPool, changes
from diptych.workers.channel import Deliver, Drain, Emit, EngineChannel, Peers, Report, SessionGone, ToEngine
from diptych.workers.handover import Handover
from diptych.workers.parallel.lead import LeadingRunner
from diptych.workers.runner import Launch, Launched, Runner
from diptych.workers.scheduler import Scheduler, Step
from diptych.workers.sequence import Sequence, State
from diptych.workers.settings import WorkerSettings

log = logging.getLogger("diptych.engine")

TOMBSTONES = 4096
FAILURES = 3
REPORT_EVERY = 0.1  # seconds between two reports of a busy engine


class Engine:
    """Everything one rank does. `run` returns when the front is gone."""

    def __init__(
        self,
        settings: WorkerSettings,
        runner: Runner | LeadingRunner,
        pools: Seq[BlockPool],
        channel: EngineChannel,
        handover: Handover,
    ) -> None:
        """pools: one a data rank."""
        self.settings, self.limits = settings, settings.limits
        self.runner, self.pools, self.channel, self.handover = runner, tuple(pools), channel, handover
        self.scheduler = Scheduler(pools, settings.max_batch, settings.token_budget, handover.revoke)
        self.sequences: dict[Key, Sequence] = {}
        self.lingering: list[Sequence] = []  # ended, but a launched step still uses their blocks
        self.tombstones: OrderedDict[Key, int] = OrderedDict()
        self.draining = False
        self.generated_total = 0
        self.failures = 0
        self.step_ns = 0
        self._busy = False
        self._launched: deque[Launched] = deque()
        self._outbox: dict[str, list[TokenOut]] = defaultdict(list)
        self._drawn_at = 0
        self._swept = 0
        self._reported = 0
        self._report_due = True

    # ── the loop ───────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        try:
            while True:
                self.turn()
        except EOFError:
            log.info("the front is gone; ending")

    def turn(self) -> None:
        """One turn: what came in, then a step, then what goes out. Waits only when there is nothing to compute."""
        idle = not self._busy
        for message in self.channel.wait(self._patience() if idle else 0.0):
            self._handle(message)
        self.handover.events(self)
        now = monotonic_ns()
        self._sweep(now)
        for seq in self.scheduler.grants():
            self._granted(seq)
        step = self.scheduler.schedule()
        if step is not None:
            self._announce_revoked(step)
            if step.rows:  # or making room was all that it did
                self._launch(step)
        self._commit_all(keep=self.runner.overlap if step is not None else 0)
        # With nothing launched only a message, an event or a deadline can change anything, and each of them wakes us.
        self._busy = step is not None or bool(self._launched)
        self._report()

    def _patience(self) -> float:
        """How long an idle loop may sleep: a heartbeat, or less when a deadline is nearer."""
        nearest = min((seq.deadline for seq in self.sequences.values()), default=0)
        left = (nearest - monotonic_ns()) / 1e9 if nearest else self.limits.heartbeat
        return max(0.0, min(left, self.limits.heartbeat))

    def _launch(self, step: Step) -> None:
        if any(row.seq.needs_output and row.seq.pending > row.sample for row in step.rows):
            self._commit_all()  # penalties count tokens that must be on the host first
        try:
            self._launched.append(self.runner.launch(step))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this step's
            self._step_failed(step, error)

    def _commit_all(self, keep: int = 0) -> None:
        while len(self._launched) > keep:
            launched = self._launched.popleft()
            try:
                launch = launched.result()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is that step's
                self._step_failed(launched.step, error)
                continue
            self.failures = 0
            self._commit(launch)

    def _step_failed(self, step: Step, error: Exception) -> None:
        """The step's own requests fail; everybody else goes on. A device that fails every step is lost. In a group of
        several ranks nobody knows how far the others got: it ends at once, and its routers say so to everyone."""
        log.error("step %d failed", step.number, exc_info=error)
        if not self.runner.alone:
            raise Internal(f"A step of a group failed, which leaves its ranks out of step: {error!r}.") from error
        self.failures += 1
        for row in step.rows:
            row.seq.in_flight -= 1
            row.seq.pending -= row.sample
            self._settle_blocks(row.seq)
            self.end(row.seq, "error", Internal(f"A step failed: {error}"))
        if self.failures >= FAILURES:
            raise Internal(f"{FAILURES} steps in a row failed, the last with {error!r}.") from error

    # ── messages ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Deliver):
            self._deliver(message)
        elif isinstance(message, SessionGone):
            for seq in [seq for seq in self.sequences.values() if seq.session == message.session]:
                self.end(seq, "cancelled", Cancelled("The router that asked for this is gone."))
        elif isinstance(message, Peers):
            self.handover.reconcile(message.workers)
        elif isinstance(message, Drain):
            self.draining = True
        self._report_due = True

    def _deliver(self, message: Deliver) -> None:
        """A router's message. Whatever goes wrong with one request ends that request alone."""
        try:
            asked = to_worker.decode(message.message)
        except msgspec.MsgspecError:
            log.exception("a router sent what is no message of this protocol; it is dropped")
            return
        if isinstance(asked, Cancel):
            self._cancel(asked)
        elif isinstance(asked, Start):
            self._start(asked)
        elif isinstance(asked, (Reserve, Prefill, Generate)):
            if asked.request.key in self.sequences:
                return  # repeated
            try:
                self._accept(asked, message.session)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's
                told = error if isinstance(error, DiptychError) else Internal(f"The request was not taken: {error!r}")
                self._emit(message.session, Ended(asked.request.key, "error", code=told.code, message=str(told)))

    def _accept(self, asked: Reserve | Prefill | Generate, session: str) -> None:
        request = asked.request
        if request.key in self.tombstones:
            raise Cancelled("It was cancelled before it came.")
        if self.draining:
            raise CapacityExceeded("This worker is draining and takes nothing new.")
        if len(self.sequences) >= self.settings.max_waiting + self.settings.max_batch * len(self.pools):
            raise CapacityExceeded(f"This worker holds {len(self.sequences)} requests already; try again later.")
        seq = self._sequence(request, session)
        if isinstance(asked, Prefill):
            self._refuse_what_never_fits(seq.prompt_len, seq)
            seq.single, seq.decode = True, asked.decode
            seq.state = State.GRANT_WAIT
        else:
            self._refuse_what_never_fits(seq.full_length, seq)
        self.sequences[seq.key] = seq
        if isinstance(asked, Reserve):
            seq.prefill = asked.prefill
            self.scheduler.reserve(seq)
        elif seq.decode is None:
            self.scheduler.enqueue(seq)

    def _sequence(self, request: Request, session: str) -> Sequence:
        return Sequence(request, session, self.pools[0].block_size, hashed=self.pools[0].prefix_cache)

    def _refuse_what_never_fits(self, tokens: int, seq: Sequence) -> None:
        capacity = self.pools[0].num_blocks * self.pools[0].block_size
        if tokens > capacity:
            whose = "this worker's whole KV cache" if len(self.pools) == 1 else "the KV cache of each data rank"
            raise CapacityExceeded(
                f"This request needs room for {tokens} tokens ({seq.prompt_len} of prompt, max_tokens"
                f" {seq.request.stopping.max_tokens}) and {whose} holds {capacity}."
            )

    def _start(self, asked: Start) -> None:
        seq = self.sequences.get(asked.key)
        if seq is None or seq.state is not State.GRANT_WAIT:
            return
        seq.held = seq.sent = asked.held
        seq.decode_rank = asked.data_rank
        seq.close(telemetry.PREFILL_GRANT_WAIT, monotonic_ns(), **{telemetry.CAUSE: "grant"})
        self.scheduler.enqueue(seq)

    def _cancel(self, asked: Cancel) -> None:
        seq = self.sequences.get(asked.key)
        if seq is not None:
            self.end(seq, "cancelled", Cancelled(asked.reason))
            return
        self.tombstones[asked.key] = monotonic_ns()
        while len(self.tombstones) > TOMBSTONES:
            self.tombstones.popitem(last=False)

    def _granted(self, seq: Sequence) -> None:
        now = monotonic_ns()
        seq.close(telemetry.DECODE_GRANT, now, **{telemetry.CAUSE: "blocks"})
        missing = seq.prompt_len - seq.held
        local = seq.held > 0 and missing <= self.settings.local_prefill and seq.request.prompt_logprobs is None
        if local:
            self.scheduler.localise(seq)
        else:
            self.handover.expect(seq)
        self._emit(seq.session, Granted(seq.key, seq.held, local, seq.data_rank))

    def _announce_revoked(self, step: Step) -> None:
        """A revoked reservation is prefilled here once there is room: its router then needs no prefill worker."""
        for seq in step.revoked:
            self._emit(seq.session, Granted(seq.key, 0, True))
        for seq in step.preempted:
            self._close_decode(seq, monotonic_ns())

    # ── what link threads report, by way of `handover.events` ─────────────────────────────────────────────────────

    def arrived(self, key: Key, first_token: int, stage: Stage | None) -> None:
        """All KV of a reserved sequence is here: it joins the batch, seeded with prefill's token."""
        seq = self.sequences.get(key)
        if seq is None or seq.state is not State.RESERVED:
            return
        if stage is not None:
            seq.stages.append(stage)
        seq.computed = seq.prompt_len
        seq.target = seq.prompt_len
        seq.tokens.append(first_token)
        seq.publish(self.scheduler.lane(seq).pool.publish, seq.prompt_len)
        seq.close(telemetry.HANDOVER, monotonic_ns())
        self.scheduler.admit(seq)

    def handed(self, key: Key, error: DiptychError | None, stage: Stage | None) -> None:
        """A transfer has ended at this sender."""
        seq = self.sequences.get(key)
        if seq is None:
            return
        if stage is not None:
            seq.stages.append(stage)
        if error is None and seq.state is State.SENDING:
            self.end(seq, "handed")
        else:
            reason = "cancelled" if isinstance(error, Cancelled) else "error"
            self.end(seq, reason, error or Internal("A transfer ended before its prefill did."))

    def lose_decode(self, peer: str, error: DiptychError) -> None:
        """The link to a decode worker is gone: whatever was to be handed over to it ends."""
        for seq in [seq for seq in self.sequences.values() if seq.decode == peer]:
            self.end(seq, "error", error)

    def report_due(self) -> None:
        self._report_due = True

    def forsake(self, key: Key, error: DiptychError) -> None:
        """KV that a reservation waits for will not come. A sequence that no longer waits (it was revoked and is
        prefilled here) goes on."""
        seq = self.sequences.get(key)
        if seq is not None and seq.state is State.RESERVED:
            self.end(seq, "error", error)

    # ── commit ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _commit(self, launch: Launch) -> None:
        """Applies a step's results: tokens go out, sequences end, move on, or are handed over."""
        self.step_ns = launch.finished - max(launch.started, self._drawn_at)
        self._drawn_at = launch.finished
        drawn = iter(launch.drawn)
        for index, row in enumerate(launch.step.rows):
            seq = row.seq
            token = next(drawn) if row.sample else None
            seq.in_flight -= 1
            seq.pending -= row.sample
            if seq.state is State.ENDED:
                self._settle_blocks(seq)
                continue
            self._note_stage(seq, row.count > 1 or row.start + row.count <= seq.target, row.count, launch)
            seq.prompt_logprobs += launch.prompt.get(index, ())
            if seq.blocks:
                seq.publish(self.scheduler.lane(seq).pool.publish, row.start + row.count)
            if token is not None:
                self._draw(seq, token.token, (token.logprob,) if token.logprob is not None else ())
            elif seq.decode is not None and seq.request.stopping.max_tokens > 1:
                self.handover.send(seq, row.start + row.count)
        self._flush()
        self._report_due = True

    def _note_stage(self, seq: Sequence, chunk: bool, count: int, launch: Launch) -> None:
        batch = len(launch.step.rows)
        if chunk:
            if launch.started > seq.mark:
                preempted = seq.generated > 0
                name = telemetry.DECODE_PREEMPTED if preempted else telemetry.PREFILL_QUEUE
                cause = "blocks" if preempted else self.scheduler.blocked_on
                seq.close(name, launch.started, **{telemetry.CAUSE: cause})
            attributes = {telemetry.TOKENS: count, telemetry.BATCH: batch, telemetry.CACHED_TOKENS: seq.cached}
            seq.close(telemetry.PREFILL_CHUNK, launch.finished, **attributes)
            return
        if not seq.steps and seq.prefill is not None and launch.started > seq.mark:
            seq.close(telemetry.DECODE_QUEUE, launch.started, **{telemetry.CAUSE: "batch"})
        seq.steps += 1
        seq.batch_sum += batch

    def _draw(self, seq: Sequence, token: int, logprobs: tuple[object, ...]) -> None:
        position = seq.generated
        seq.tokens.append(token)
        seq.here += 1
        self.generated_total += 1
        self._outbox[seq.session].append(TokenOut(seq.key, position, (token,), logprobs))  # type: ignore[arg-type]
        stopping = seq.request.stopping
        if token in seq.stops and seq.generated > stopping.min_tokens:
            self.end(seq, "stop", stop_id=token)
        elif seq.generated >= stopping.max_tokens:
            self.end(seq, "length")
        elif seq.single:
            self.scheduler.remove(seq)
            seq.state = State.SENDING
            self.handover.finish(seq, token)

    # ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────

    def end(self, seq: Sequence, reason: str, error: DiptychError | None = None, stop_id: int | None = None) -> None:
        """The one way a sequence ends. Its blocks return now, or when steps and transfers that use them are done."""
        if self.sequences.pop(seq.key, None) is None:
            return
        self._close_decode(seq, self._drawn_at if reason in ("stop", "length") else monotonic_ns())
        self.scheduler.remove(seq)
        self.handover.cancel(seq, error or Cancelled("It ended."))
        self.lingering.append(seq)
        self._settle_blocks(seq)
        self._flush()
        self._emit(
            seq.session,
            Ended(
                seq.key,
                reason,  # type: ignore[arg-type]
                generated=seq.here,
                cached=seq.cached,
                stop_id=stop_id,
                code=error.code if error else "",
                message=str(error) if error else "",
                prompt_logprobs=tuple(seq.prompt_logprobs),
                stages=tuple(seq.stages),
            ),
        )
        self._report_due = True

    def _close_decode(self, seq: Sequence, now: int) -> None:
        if seq.steps and now > seq.mark:
            seq.close(
                telemetry.DECODE_STEPS,
                now,
                **{telemetry.STEPS: seq.steps, telemetry.BATCH: round(seq.batch_sum / seq.steps, 2)},
            )
            seq.steps = seq.batch_sum = 0

    def _settle_blocks(self, seq: Sequence) -> None:
        if seq.state is State.ENDED and seq.in_flight == 0 and seq in self.lingering:
            self.lingering.remove(seq)
            self.scheduler.lane(seq).pool.release(seq.blocks)
            seq.blocks = []

    def _sweep(self, now: int) -> None:
        """Deadlines, wherever a sequence stands; old tombstones. Runs when idle too."""
        if now - self._swept < 20_000_000:
            return
        self._swept = now
        for seq in [seq for seq in self.sequences.values() if now >= seq.deadline]:
            self.end(seq, "error", DeadlineExceeded(f"Its {seq.request.deadline_s:.1f} s ran out ({seq.state.value})."))
        while self.tombstones and now - next(iter(self.tombstones.values())) > self.limits.orphan * 1e9:
            self.tombstones.popitem(last=False)

    # ── what goes out ──────────────────────────────────────────────────────────────────────────────────────────────

    def _emit(self, session: str, message: Granted | Ended | StepMessage) -> None:
        self.channel.send(Emit(session, pack(message)))

    def _flush(self) -> None:
        """One message a step and router carries all its tokens."""
        for session, tokens in self._outbox.items():
            self._emit(session, StepMessage(tuple(tokens), self._drawn_at))
        self._outbox.clear()

    def _report(self) -> None:
        now = monotonic_ns()
        since = (now - self._reported) / 1e9
        due = self._report_due and not (self._busy and since < REPORT_EVERY)
        if not due and since < self.limits.heartbeat:
            return
        if not self._busy and self.settings.check_integrity:
            self.check_integrity()
        self._reported, self._report_due = now, False
        gained, lost = changes(self.pools)
        scheduler = self.scheduler
        waiting = sum(seq.state is State.GRANT_WAIT for seq in self.sequences.values())
        load = Load(
            clock=(0, 0),
            running=scheduler.running + sum(seq.state is State.SENDING for seq in self.sequences.values()),
            waiting=len(scheduler.waiting) + len(scheduler.block_wait) + waiting,
            reserved=scheduler.reserved,
            free_blocks=sum(pool.available for pool in self.pools),
            total_blocks=sum(pool.num_blocks for pool in self.pools),
            cached_blocks=sum(pool.cached for pool in self.pools),
            step_ms=self.step_ns / 1e6,
            generated_total=self.generated_total,
            links=self.handover.links(),
            gained=gained,
            lost=lost,
            draining=self.draining,
            experts=self.runner.decoder.expert_load(),
            softmax_rows=tuple(self.runner.softmax_counts.tolist()),
        )
        self.channel.send(Report(load))

    def check_integrity(self) -> None:
        """Raises AssertionError unless the pools' books agree with every holder there is."""
        for data_rank, pool in enumerate(self.pools):
            held = (*self.sequences.values(), *self.lingering)
            holders = [seq.blocks for seq in held if seq.data_rank == data_rank]
            pool.check_integrity([*holders, *self.handover.held(data_rank)])
