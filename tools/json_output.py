"""What each command prints with `--json`, as types. `json_docs.py` makes the JSON schemas of docs/schemas of them,
with the comments as descriptions; the tests hold what commands print against those.
"""

from typing import Annotated, Any, Literal, NamedTuple, NotRequired

from typing_extensions import TypedDict  # Pydantic takes no other before Python 3.12

from localllm.benchmark import result
from localllm.benchmark.ceilings import Ceilings
from localllm.benchmark.load.drive import Load
from localllm.benchmark.machine import Machine, Noise
from localllm.benchmark.roofline import Bound, Roofline
from localllm.benchmark.scenario import Scenario
from localllm.benchmark.summary import Ratio
from localllm.checkpoint.facts import Format
from localllm.cli.doctor import Finding
from localllm.cli.doctor_checks import Examination
from localllm.cli.models import State
from localllm.comparison.replay import Replayed
from localllm.hub import verify
from localllm.modelfile import edition
from localllm.plan.speed import Speed
from localllm.quality.report import Quality
from localllm.receipts import receipt
from localllm.server.models import ModelEvent
from localllm.tui.top_board import ModelSnapshot, ServerSnapshot, Throughput

FLATTEN = "flat"  # the fields of this one stand beside the others


class Measurements(TypedDict):
    """Of one answer, defined in localllm/metrics.py; null where nothing was measured."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the cache
    output_tokens: int
    queue_s: float | None
    load_s: float | None
    prefill_s: float | None
    prefill_tokens_per_s: float | None
    ttft_s: float | None  # time to the first token
    tpot_s: float | None  # time per output token, behind the first
    tokens_per_s: float | None
    itl_p50_s: float | None  # gaps between tokens
    itl_p95_s: float | None
    itl_p99_s: float | None
    itl_s: list[float]  # every gap
    e2e_s: float | None
    peak_bytes: int | None
    draft_tokens: int
    accepted_tokens: int
    tokens_per_step: float | None


class Distribution(TypedDict):
    """Values of one measure; null where nothing could be measured."""

    count: int
    mean: float | None
    low: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    high: float | None


class Requests(TypedDict):
    """All streams of all rounds."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    ttft_s: Distribution
    itl_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    tokens_per_s: Distribution
    prefill_tokens_per_s: Distribution


class Roof(TypedDict):
    """What a step could be at most, and what keeps it from that."""

    times: Annotated[Roofline, FLATTEN]
    bytes_per_s: float
    flops_per_s: float
    of_memory: float  # fraction of that roof
    of_compute: float
    of_roof: float  # of the lower of the two
    host_share: float  # of the time
    bound: Bound


class Stream(TypedDict):
    arrival_s: float  # from the first of the round
    measured: Annotated[Measurements, FLATTEN]
    begins_step: list[bool]


class Found(TypedDict):
    scenario: Annotated[Scenario, FLATTEN]
    prefill_tokens_per_s: Distribution  # by round
    decode_tokens_per_s: Distribution
    requests: Requests
    prefill: Roof
    decode: Roof | None  # null where no two steps were common to all streams
    rounds: list[list[Stream]]


class LeftOut(TypedDict):
    scenario: Annotated[Scenario, FLATTEN]
    reason: str


class Edition(TypedDict):
    loaded: Annotated[result.Loaded, FLATTEN]
    peak_bytes: int | None
    ceilings: Ceilings
    drift: float  # of the ceilings, before and after
    scenarios: list[Found]
    left_out: list[LeftOut]


class Compared(TypedDict):
    """The first edition beside the second."""

    scenario: Annotated[Scenario, FLATTEN]
    measure: str
    ratio_: Annotated[Ratio, FLATTEN]
    shown: bool  # the interval leaves out 1
    verdict: str


class Beside(TypedDict):
    noise: Annotated[Noise, FLATTEN]
    warning: str | None


class Benchmark(TypedDict):
    """How fast models are here: docs/bench.md."""

    benchmark: Literal["localllm bench"]
    date: str
    machine: Machine
    noise: Beside
    warnings: list[str]
    rounds: int
    seed: int
    prompts: str  # what they were made of
    drafts: bool
    editions: list[Edition]
    compared: list[Compared]


class Rounds(TypedDict):
    load: Annotated[Load, FLATTEN]
    rounds: int
    seed: int


class Outcome(TypedDict):
    """Seconds count from the begin of the round."""

    arrival_s: float
    sent_s: float
    pieces_s: list[float]
    ended_s: float | None
    prompt_tokens: int | None  # that the server told
    output_tokens: int | None
    counted_by: Literal["usage", "limit"] | None
    error: str | None


class Round(TypedDict):
    wall_s: float
    in_flight: list[int]  # how many others were, when each request was sent
    requests: list[Outcome]


class Server(TypedDict):
    url: str
    api: str
    model: str
    requests: int
    answers: int
    failed: int
    unanswered: int
    wall_s: float
    output_tokens: int
    counted_by_limit: int
    uncounted: int
    pieces: int
    requests_per_s: float | None
    output_tokens_per_s: float | None
    met: int | None  # requests that met every objective; null without objectives
    goodput_requests_per_s: float | None
    most_in_flight: int
    queue_grows: bool
    errors: dict[str, int]  # by kind
    prompt_tokens: Distribution
    ttft_s: Distribution
    itl_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    tokens_per_s: Distribution
    late_s: Distribution
    rounds: list[Round]


class LoadTest(TypedDict):
    """A load on servers, with --against."""

    benchmark: Literal["localllm bench --against"]
    date: str
    machine: Machine
    noise: Noise | None
    complete: bool  # it was not broken off
    load: Rounds
    prompt: int  # of `prompt_unit`
    prompt_unit: Literal["tokens", "words"]
    shared_prefix: int
    output: int
    ignore_eos: bool
    objectives_s: dict[str, float] | None
    notes: list[str]
    servers: list[Server]


# What the commands print with `--json` that get, keep and describe models, as types; see `printed.py`.
class File(TypedDict):
    path: str
    bytes: int
    here: int  # bytes of it


class Begin(TypedDict):
    event: Literal["begin"]
    repo: str
    commit: str
    bytes: int  # of all files
    missing: int  # bytes
    files: list[File]


class Progress(TypedDict):
    event: Literal["progress"]
    path: str
    done: int  # bytes


class Note(TypedDict):
    event: Literal["note"]
    text: str  # what is tried again, who is waited for


class Verified(TypedDict):
    event: Literal["verified"]
    path: str
    bytes: int


class Pulled(TypedDict):
    event: Literal["done"]
    path: str  # of the model


class Part(TypedDict):
    event: Literal["part"]
    part: str
    done: int
    of: int


class Report(TypedDict):
    """How far a model is from another: docs/quality.md."""

    version: int
    quality: Annotated[Quality, FLATTEN]


class Quantized(TypedDict):
    event: Literal["done"]
    path: str  # of what was written
    quality: Report | None  # null where memory does not hold both


class Layers(TypedDict):
    kind: str
    count: int


class Listed(TypedDict):
    """A model; null where nothing is known."""

    name: str
    state: State
    path: str | None
    repo: str | None
    license: str | None
    stated_parameters: str | None  # by the catalogue
    context: int | None  # tokens
    download_bytes: int | None  # about, by the catalogue
    architecture: str | None
    layers: list[Layers] | None
    hidden_size: int | None
    vocab_size: int | None
    parameters: int | None  # by the description
    active_parameters: int | None  # that one token meets
    kv_bytes_per_token: int | None  # in 16 bits
    state_bytes: int | None  # what recurrent layers keep of a sequence
    dimensions: int | None  # of an embedder's vectors
    formats: list[Format] | None
    weight_bytes: int | None
    quantization: str | None
    chat_templates: list[str] | None  # names
    sampling: dict[str, Any] | None  # what the model recommends that is not neutral anyway
    quality: Report | None


class Shown(Listed):
    edition: edition.Edition | None  # of a name that `create` made


class Place(TypedDict):
    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    bandwidth: float  # bytes a second
    flops: float  # operations a second
    measured: bool
    source: str


class Choice(TypedDict):
    quant: str | None
    dtype: str
    weight_bytes: int
    fits: bool
    most_context: int  # tokens
    ceiling: Speed


class Planned(TypedDict):
    """What a model takes, and how fast it would run: docs/plan.md."""

    model: str
    device: Place
    stored_as: str | None
    quant: str | None
    dtype: str
    kv_dtype: str
    context: int  # tokens of prompt and answer of each user
    max_context: int
    users: int
    prompt: int  # tokens that TTFT is told of
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_token_in_8_bits: int
    kv_bytes_per_sequence: int
    kv_bytes_read: int
    kv_bytes: int
    state_bytes_per_sequence: int
    state_bytes: int
    activation_bytes: int
    total_bytes: int
    allocated_bytes: int | None
    fits: bool
    refusal: str | None  # why not
    remedy: str | None
    most_context: int
    most_users: int
    engine_users: int
    ceiling: Speed  # that memory and arithmetic allow
    expected: Speed | None
    expectation: str | None  # what that is drawn from
    quantizations: list[Choice]
    best: str | None


class KeptFile(TypedDict):
    path: str
    bytes: int
    why: str


class Removed(TypedDict):
    """A model of the cache."""

    name: str
    repo: str
    revision: str | None
    files: list[str]  # paths that went
    unfinished: int  # downloads that were broken off and went
    freed_bytes: int  # that the disk has back
    kept: list[KeptFile]
    dry_run: bool  # nothing was removed


class RemovedName(TypedDict):
    """A name that `cp` gave."""

    name: str
    alias_of: str
    freed_bytes: Literal[0]
    dry_run: bool


class RemovedQuant(TypedDict):
    """What `--quant` made of a model."""

    name: str
    quant: str
    paths: list[str]
    freed_bytes: int
    dry_run: bool


class CheckedFile(TypedDict):
    path: str
    bytes: int
    state: verify.FileState
    fetched_again: bool


class Checked(TypedDict):
    """Result of verifying one cached model against its digests."""

    name: str
    repo: str
    revision: str | None
    commit: str
    path: str
    files: list[CheckedFile]


class Named(TypedDict):
    """An alias and the model that it stands for."""

    name: str
    source: str  # what it stands for


class Created(TypedDict):
    """An edition that was made."""

    name: str
    edition: edition.Edition


class ToolCall(TypedDict):
    id: str
    name: str
    arguments: dict[str, Any]  # as the model gave them


class Likely(TypedDict):
    token_id: int
    token: str  # its text
    logprob: float | None  # null: it cannot be


class Logprob(Likely):
    top: list[Likely]  # the N likeliest


class Receipt(TypedDict):
    """What `localllm replay` needs to compute the answer again: docs/receipts.md."""

    version: int
    receipt: Annotated[receipt.Receipt, FLATTEN]


class Answer(TypedDict):
    """One answer."""

    model: str
    device: str  # cpu, cuda:0
    dtype: str  # it computed in
    kv_dtype: str  # of keys and values
    context: int  # tokens that it had room for
    text: str  # the answer
    reasoning: str  # what the model thought before; "" where it did not
    tool_calls: list[ToolCall]
    token_ids: list[int]  # all that the model said, thoughts and markup too
    finish_reason: Literal["stop", "length"]  # `length`: --max-tokens or the context cut it
    seed: int | None  # that was used, given or drawn
    metrics: Measurements | None
    receipt: Receipt
    logprobs: NotRequired[list[Logprob]]  # with --logprobs, one a token
    prompt_logprobs: NotRequired[list[Logprob]]  # with --prompt-logprobs, of each token but the first


class Talk(TypedDict):
    """A kept conversation; null where its file is damaged."""

    id: str
    title: str | None
    model: str | None
    began: str | None  # UTC
    changed: str | None  # UTC
    questions: int | None
    bytes: int
    fault: str | None  # why it cannot be read


class Spot(TypedDict):
    question: int  # from 1; 0: the title or the system prompt
    part: str  # title, system, question, file, thoughts or answer
    before: str
    match: str
    after: str


class FoundTalk(Talk):
    place: Spot


class Deleted(TypedDict):
    """A conversation that --rm deleted."""

    id: str


class Vector(TypedDict):
    """One text."""

    index: int  # of the text, from 0
    tokens: int
    truncated: int  # tokens that were cut off
    embedding: list[float]


class Loaded(TypedDict):
    name: str
    path: str
    device: str
    dtype: str
    kv_dtype: str
    context: int  # tokens
    bytes: int  # weights and cache
    since: float  # seconds since 1970
    until: float | None  # when it is unloaded if nobody asks, in seconds since 1970; null: never
    users: int
    running: int  # answers under way
    waiting: int  # requests
    blocks: int  # of the cache
    used_blocks: int
    cached_blocks: int  # whose content later requests would find


class Served(TypedDict):
    """What a server has loaded."""

    server: str
    version: str
    models: list[Loaded]
    loading: list[str]  # names
    events: list[ModelEvent]


class Watched(TypedDict):
    seen: Annotated[ModelSnapshot, FLATTEN]
    pace: Throughput | None  # null: it was loaded meanwhile


class Looked(TypedDict):
    """One reading of a server's state, as `top` prints it."""

    glance: Annotated[ServerSnapshot, FLATTEN]
    models: list[Watched]


class Stopped(TypedDict):
    """A model that was told to go."""

    name: str
    users: int  # whose answers end first


class Replay(TypedDict):
    """An answer that was computed again."""

    identical: bool
    replayed: Annotated[Replayed, FLATTEN]
    margin: float | None  # how much likelier the token of then is, in natural logarithms


class Summary(TypedDict):
    """What a batch came to: tokens and times are of this run, lines of the whole file."""

    lines: int
    ok: int
    failed: int
    kept: int  # answered by an earlier run
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float | None
    answer_tokens: int
    seconds: float
    tokens_per_s: float | None
    lines_per_s: float | None
    steps: int
    tokens_per_step: float | None


class Token(TypedDict):
    id: int
    text: str
    kind: Literal["control", "added", "text"]  # `added`: matched as a whole


class Prompt(TypedDict):
    """The prompt that a conversation becomes."""

    prompt: str
    token_ids: list[int]
    tokens: list[Token]


class Health(TypedDict):
    """What a machine has and lacks."""

    fine: bool  # nothing is broken that `localllm run` needs
    seen: Annotated[Examination, FLATTEN]
    findings: list[Finding]


class JsonOutput(NamedTuple):
    stdout: Literal["object", "array", "lines"]  # `lines`: an object each
    type: Any  # of the object, or of each


JSON_OUTPUTS = {
    "run": JsonOutput("object", Answer),
    "chats": JsonOutput("array", Talk | FoundTalk | Deleted),
    "embed": JsonOutput("lines", Vector),
    "ps": JsonOutput("object", Served),
    "top": JsonOutput("object", Looked),
    "stop": JsonOutput("object", Stopped),
    "replay": JsonOutput("object", Replay),
    "pull": JsonOutput("lines", Begin | Progress | Note | Verified | Pulled),
    "list": JsonOutput("array", Listed),
    "show": JsonOutput("object", Shown),
    "plan": JsonOutput("object", Planned),
    "bench": JsonOutput("object", Benchmark | LoadTest),
    "quantize": JsonOutput("lines", Part | Quantized),
    "diff": JsonOutput("object", Report),
    "batch": JsonOutput("object", Summary),
    "rm": JsonOutput("array", Removed | RemovedName | RemovedQuant),
    "verify": JsonOutput("array", Checked),
    "cp": JsonOutput("object", Named),
    "create": JsonOutput("object", Created),
    "template": JsonOutput("object", Prompt),
    "doctor": JsonOutput("object", Health),
}
