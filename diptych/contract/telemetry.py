"""Names of spans, stages and attributes: the only place where they are spelled.

A request's trace has one root, drawn by the router, and a child for every stage. Two chains of contiguous stages leave
the root; each stage ends with the event that starts the next:

    to the first token:  ROUTER_PREPARE, ROUTER_ROUTE, ROUTER_DISPATCH, PREFILL_QUEUE, PREFILL_CHUNK…, FIRST_DELIVERY
    to the last token:   … PREFILL_CHUNK, HANDOVER, DECODE_QUEUE, DECODE_STEPS (and DECODE_PREEMPTED), LAST_DELIVERY

HANDOVER's own children (TRANSFER_WAIT, _PACK, _WIRE, _UNPACK) may overlap prefill; they carry bytes and process ids.
"""

REQUEST = "diptych.request"
ATTEMPT = "diptych.attempt"

# router
ROUTER_PREPARE = "router.prepare"  # received → validated, templated, tokenised
ROUTER_ROUTE = "router.route"  # → workers chosen (waiting for capacity included, with its cause)
ROUTER_DISPATCH = "router.dispatch"  # → received by the engine that prefills
FIRST_DELIVERY = "router.first_delivery"  # first token drawn → its text given to the transport
LAST_DELIVERY = "router.last_delivery"  # last token drawn → its text given to the transport

# engine, prefill
PREFILL_GRANT_WAIT = "prefill.grant_wait"  # received → decode's grant arrived (cause: grant)
PREFILL_QUEUE = "prefill.queue"  # → first chunk launched (cause: batch, blocks)
PREFILL_CHUNK = "prefill.chunk"  # one chunk: launched → computed; the last one ends with the first token drawn

# engine, decode
DECODE_GRANT = "decode.grant"  # reserve received → granted (cause: blocks)
HANDOVER = "decode.handover"  # first token drawn → sequence admitted by decode
DECODE_QUEUE = "decode.queue"  # admitted → in its first step
DECODE_STEPS = "decode.steps"  # → last token drawn (or preempted)
DECODE_PREEMPTED = "decode.preempted"  # preempted → running again (cause: blocks)

# transfer, on both ends
TRANSFER_SEND = "transfer.send"
TRANSFER_RECEIVE = "transfer.receive"

# attributes
CAUSE = "diptych.cause"
BESIDE = "diptych.beside"  # true: the stage overlaps others of its attempt and explains no time of its own
ROLE = "diptych.role"
WORKER = "diptych.worker"
PID = "diptych.pid"
ATTEMPT_NUMBER = "diptych.attempt.number"
CHOICE = "diptych.choice"
REQUEST_ID = "diptych.request_id"
TOKENS = "diptych.tokens"
CACHED_TOKENS = "diptych.cached_tokens"
BATCH = "diptych.batch"
STEPS = "diptych.steps"
BYTES = "diptych.bytes"
MESSAGES = "diptych.messages"
WAIT_NS = "diptych.wait_ns"
PACK_NS = "diptych.pack_ns"
WIRE_NS = "diptych.wire_ns"
UNPACK_NS = "diptych.unpack_ns"
TRANSPORT = "diptych.transport"
PEER = "diptych.peer"
CLOCK_OFFSET_NS = "diptych.clock.offset_ns"
CLOCK_ERROR_NS = "diptych.clock.error_ns"
UNEXPLAINED_NS = "diptych.unexplained_ns"
TTFT_NS = "diptych.ttft_ns"
TERMINAL = "diptych.terminal"
ERROR_CODE = "diptych.error"

# OpenTelemetry's GenAI conventions
GEN_AI_OPERATION = "gen_ai.operation.name"
GEN_AI_MODEL = "gen_ai.request.model"
GEN_AI_INPUT_TOKENS = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
GEN_AI_FINISH_REASONS = "gen_ai.response.finish_reasons"
