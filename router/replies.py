"""What has been generated → the protocol's answers."""

from __future__ import annotations

from collections.abc import Iterable

from diptych import __version__
from diptych.contract.wire import Logprob
from diptych.router.call import Call, Piece
from diptych.router.choice import Terminal
from diptych.router.facts import ModelFacts
from diptych.router.life import Desk
from diptych.router.prepare import Prepared
from diptych.router.tokenizer import Tokenizer
from diptych.v1 import inference_pb2 as pb

REASONS = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class Replies:
    """Makes answers of finished calls and their pieces. A call must be prepared."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chunk(self, call: Call, piece: Piece) -> pb.GenerateStreamResponse:
        asked = _prepared(call).order
        answer = pb.GenerateStreamResponse(
            request_id=call.id,
            index=piece.choice.index,
            text="".join(piece.text),
            token_ids=piece.ids if asked.token_ids else (),
            logprobs=self._logprobs(piece.ids, piece.logprobs),
        )
        if piece.finish is not None:
            answer.completion_tokens = piece.choice.next
            _finish(answer, piece.finish)
        return answer

    def last(self, call: Call, chunk: pb.GenerateStreamResponse) -> None:
        """Completes a stream's last message."""
        chunk.usage.CopyFrom(self._usage(call))
        chunk.timings.CopyFrom(self._timings(call))
        if (prompt := self._prompt(call)) is not None:
            chunk.prompt.CopyFrom(prompt)

    def whole(self, call: Call, pieces: Iterable[Piece]) -> pb.GenerateResponse:
        return pb.GenerateResponse(
            request_id=call.id,
            choices=[self._choice(call, piece) for piece in pieces],
            usage=self._usage(call),
            timings=self._timings(call),
            prompt=self._prompt(call),
        )

    def _choice(self, call: Call, piece: Piece) -> pb.Choice:
        answer = pb.Choice(
            index=piece.choice.index,
            text="".join(piece.text),
            token_ids=piece.ids if _prepared(call).order.token_ids else (),
            logprobs=self._logprobs(piece.ids, piece.logprobs),
            completion_tokens=piece.choice.next,
        )
        if piece.finish is not None:
            _finish(answer, piece.finish)
        return answer

    def _usage(self, call: Call) -> pb.Usage:
        return pb.Usage(
            prompt_tokens=len(_prepared(call).prompt),
            cached_tokens=max(choice.cached for choice in call.choices),
            completion_tokens=sum(choice.next for choice in call.choices),
        )

    def _timings(self, call: Call) -> pb.Timings:
        def since(at: int) -> float:
            return (at - call.received) / 1e9

        return pb.Timings(
            prepared=since(call.prepared_at),
            routed=since(max(choice.marks.routed for choice in call.choices)),
            first_token=since(min(choice.marks.first_ready for choice in call.choices)),
            last_token=since(max(choice.terminal.at for choice in call.choices if choice.terminal)),
        )

    def _prompt(self, call: Call) -> pb.PromptInfo | None:
        prepared = _prepared(call)
        ids = prepared.prompt if prepared.order.token_ids else ()
        if prepared.order.prompt_logprobs is None:
            return pb.PromptInfo(token_ids=ids) if ids else None
        first = pb.TokenLogprob(id=prepared.prompt[0], text=self._tokenizer.token_text(prepared.prompt[0]))
        rest = self._logprobs(prepared.prompt[1:], call.choices[0].prompt_logprobs)
        return pb.PromptInfo(token_ids=ids, logprobs=[first, *rest])

    def _logprobs(self, ids: Iterable[int], logprobs: Iterable[Logprob]) -> list[pb.TokenLogprob]:
        """None were asked for: none are there."""
        text = self._tokenizer.token_text
        return [
            pb.TokenLogprob(
                id=token,
                text=text(token),
                logprob=each.logprob,
                top=[pb.TopLogprob(id=other, text=text(other), logprob=value) for other, value in each.top],
            )
            for token, each in zip(ids, logprobs, strict=False)
        ]


def model_info(facts: ModelFacts, desk: Desk, chat: bool) -> pb.GetModelInfoResponse:
    room = desk.room()
    return pb.GetModelInfoResponse(
        model=facts.name,
        architecture=facts.architecture,
        vocabulary=facts.vocabulary,
        max_context=room.tokens,
        max_prompt=min(room.prompt, room.tokens - 1),
        end_token_ids=facts.end_ids,
        chat=chat,
        revision=next((session.worker.revision for session in desk.sessions.open()), ""),
    )


def server_info(desk: Desk) -> pb.GetServerInfoResponse:
    return pb.GetServerInfoResponse(
        version=__version__,
        requests=desk.active,
        waiting=desk.waiting,
        ready=desk.ready(),
        workers=[_worker(desk, worker_id) for worker_id in _workers(desk)],
    )


def _workers(desk: Desk) -> list[str]:
    known = {session.id for session in desk.sessions.open()} | {info.id for info in desk.sessions.table.workers}
    return sorted(known)


def _worker(desk: Desk, worker_id: str) -> pb.Worker:
    session = desk.sessions.find(worker_id)
    if session is None:
        info = next(info for info in desk.sessions.table.workers if info.id == worker_id)
        return pb.Worker(
            id=info.id,
            role=info.role,
            total_blocks=info.total_blocks * info.data,
            pids=[info.pid, *info.engine_pids],
        )
    info, load = session.worker, session.load
    return pb.Worker(
        id=info.id,
        role=info.role,
        connected=True,
        draining=load.draining,
        running=load.running,
        waiting=load.waiting,
        reserved=load.reserved,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks or info.total_blocks * info.data,
        links=load.links,
        pids=[info.pid, *info.engine_pids],
        generated_total=load.generated_total,
        expert_tokens=load.experts,
        softmax_rows=load.softmax_rows[1],
        softmax_rows_recomputed=load.softmax_rows[0],
    )


def _finish(answer: pb.Choice | pb.GenerateStreamResponse, terminal: Terminal) -> None:
    answer.finish_reason = REASONS[terminal.reason]
    if terminal.stop_string is not None:
        answer.stop_string = terminal.stop_string
    if terminal.stop_id is not None:
        answer.stop_token_id = terminal.stop_id


def _prepared(call: Call) -> Prepared:
    assert call.prepared is not None
    return call.prepared
