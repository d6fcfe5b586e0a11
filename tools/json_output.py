"""Types of what each command prints with `--json`. `json_docs.py` generates the schemas in docs/schemas from them,
with the comments as descriptions, and tests validate the output of the commands.
"""

from typing import Annotated, Any, Literal, NamedTuple, NotRequired

from typing_extensions import TypedDict  # Pydantic supports no other before Python 3.12

from localllm.benchmark import result
from localllm.benchmark.load.drive import Load
from localllm.benchmark.machine import Machine, Noise
from localllm.benchmark.products import ProductRate
from localllm.benchmark.roofline import Bound, Ceilings, Roofline
from localllm.benchmark.scenario import Scenario
from localllm.benchmark.summary import Ratio
from localllm.checkpoint.facts import Format
from localllm.cli.doctor import Examination, Finding
from localllm.cli.models import State
from localllm.comparison.replay import Replayed
from localllm.hub import verify
from localllm.modelfile import edition
from localllm.plan.estimated import Estimate
from localllm.plan.speed import Speed
from localllm.quality.report import Quality
from localllm.receipts import receipt
from localllm.server.models import ModelEvent
from localllm.simulate.capacity import Sensitivity
from localllm.simulate.serving import ServingOption
from localllm.simulate.simulation import EngineSetup, ReplicaUse
from localllm.tui.top_board import ModelSnapshot, ServerSnapshot, Throughput

FLATTEN = "flat"  # marks a field that is replaced by the fields of its type


class Measurements(TypedDict):
    """Measurements of one answer, defined in localllm/metrics.py; null if not measured."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens found in the KV cache
    disk_tokens: int  # of these, loaded from the disk
    output_tokens: int
    queue_s: float | None
    load_s: float | None
    prefill_s: float | None
    prefill_tokens_per_s: float | None
    ttft_s: float | None  # time to the first token
    tpot_s: float | None  # time per output token after the first
    tokens_per_s: float | None
    itl_p50_s: float | None  # inter-token latency
    itl_p95_s: float | None
    itl_p99_s: float | None
    itl_s: list[float]  # each inter-token latency
    e2e_s: float | None
    peak_bytes: int | None
    draft_tokens: int
    accepted_tokens: int
    tokens_per_step: float | None


class Distribution(TypedDict):
    """Distribution of one measure; null if not measured."""

    count: int
    mean: float | None
    low: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    high: float | None


class RequestTotals(TypedDict):
    """Requests of all streams and rounds."""

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


class RooflineComparison(TypedDict):
    """Comparison of a step with the roofline."""

    times: Annotated[Roofline, FLATTEN]
    bytes_per_s: float
    flops_per_s: float
    of_memory: float  # fraction of the memory roof
    of_compute: float
    of_roof: float  # fraction of the lower roof
    host_share: float  # fraction of the time spent on the host
    bound: Bound


class StreamResult(TypedDict):
    arrival_s: float  # since the first arrival of the round
    measured: Annotated[Measurements, FLATTEN]
    begins_step: list[bool]


class ScenarioResult(TypedDict):
    scenario: Annotated[Scenario, FLATTEN]
    prefill_tokens_per_s: Distribution  # over rounds
    decode_tokens_per_s: Distribution
    requests: RequestTotals
    prefill: RooflineComparison
    decode: RooflineComparison | None  # null if all streams decoded together in fewer than two steps
    rounds: list[list[StreamResult]]


class SkippedScenario(TypedDict):
    scenario: Annotated[Scenario, FLATTEN]
    reason: str


class ModelResult(TypedDict):
    loaded: Annotated[result.Loaded, FLATTEN]
    peak_bytes: int | None
    ceilings: Ceilings
    drift: float  # difference of the ceilings before and after, as a fraction
    scenarios: list[ScenarioResult]
    left_out: list[SkippedScenario]
    products: list[ProductRate] | None  # with --explain


class ModelComparison(TypedDict):
    """Comparison of the first model with the second."""

    scenario: Annotated[Scenario, FLATTEN]
    measure: str
    ratio_: Annotated[Ratio, FLATTEN]
    shown: bool  # the confidence interval excludes 1
    verdict: str


class NoiseReport(TypedDict):
    noise: Annotated[Noise, FLATTEN]
    warning: str | None


class Benchmark(TypedDict):
    """Benchmark of models on this machine: docs/bench.md."""

    benchmark: Literal["localllm bench"]
    date: str
    machine: Machine
    noise: NoiseReport
    warnings: list[str]
    rounds: int
    seed: int
    prompts: str  # source of the prompts
    drafts: bool
    editions: list[ModelResult]
    compared: list[ModelComparison]


class LoadShape(TypedDict):
    load: Annotated[Load, FLATTEN]
    rounds: int
    seed: int


class RequestResult(TypedDict):
    """One request; seconds are since the start of the round."""

    arrival_s: float
    sent_s: float
    pieces_s: list[float]
    ended_s: float | None
    prompt_tokens: int | None  # reported by the server
    output_tokens: int | None
    counted_by: Literal["usage", "limit"] | None
    error: str | None


class RoundResult(TypedDict):
    wall_s: float
    in_flight: list[int]  # other requests in flight when each request was sent
    requests: list[RequestResult]


class ServerResult(TypedDict):
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
    met: int | None  # requests that met all objectives; null without objectives
    goodput_requests_per_s: float | None
    most_in_flight: int
    queue_grows: bool
    errors: dict[str, int]  # number of errors by type
    prompt_tokens: Distribution
    ttft_s: Distribution
    itl_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    tokens_per_s: Distribution
    late_s: Distribution
    rounds: list[RoundResult]


class LoadTest(TypedDict):
    """Load test of servers, with --against."""

    benchmark: Literal["localllm bench --against"]
    date: str
    machine: Machine
    noise: Noise | None
    complete: bool  # the run was not interrupted
    load: LoadShape
    prompt: int  # length in units of `prompt_unit`
    prompt_unit: Literal["tokens", "words"]
    shared_prefix: int
    output: int
    ignore_eos: bool
    objectives_s: dict[str, float] | None
    notes: list[str]
    servers: list[ServerResult]


class RemoteFile(TypedDict):
    path: str
    bytes: int
    here: int  # bytes that are downloaded


class PullBegin(TypedDict):
    event: Literal["begin"]
    repo: str
    commit: str
    bytes: int  # of all files
    missing: int  # bytes to download
    files: list[RemoteFile]


class PullProgress(TypedDict):
    event: Literal["progress"]
    path: str
    done: int  # bytes


class PullNote(TypedDict):
    event: Literal["note"]
    text: str  # such as a retry, or waiting for another process


class PullVerified(TypedDict):
    event: Literal["verified"]
    path: str
    bytes: int


class PullDone(TypedDict):
    event: Literal["done"]
    path: str  # of the model


class QuantizeProgress(TypedDict):
    event: Literal["part"]
    part: str
    done: int
    of: int


class QualityReport(TypedDict):
    """Comparison of a model with its reference: docs/quality.md."""

    version: int
    quality: Annotated[Quality, FLATTEN]


class QuantizedModel(TypedDict):
    event: Literal["done"]
    path: str  # of the output
    quality: QualityReport | None  # null if the models do not fit into memory together


class LayerCount(TypedDict):
    kind: str
    count: int


class ModelSummary(TypedDict):
    """A model; null where a value is not known."""

    name: str
    state: State
    path: str | None
    repo: str | None
    license: str | None
    stated_parameters: str | None  # from the catalog
    context: int | None  # tokens
    download_bytes: int | None  # approximate, from the catalog
    architecture: str | None
    layers: list[LayerCount] | None
    hidden_size: int | None
    vocab_size: int | None
    parameters: int | None  # computed from the configuration
    active_parameters: int | None  # used by each token
    kv_bytes_per_token: int | None  # in 16 bits
    kv_bytes_per_token_in_4_bits: int | None  # with --kv-dtype int4; null if not supported
    state_bytes: int | None  # recurrent state of a sequence
    dimensions: int | None  # of the vectors of an embedding model
    formats: list[Format] | None
    weight_bytes: int | None
    quantization: str | None
    chat_templates: list[str] | None  # names
    sampling: dict[str, Any] | None  # recommended parameters that differ from the neutral ones
    quality: QualityReport | None


class StoredLayout(TypedDict):
    path: str
    bytes: int


class ModelDetails(ModelSummary):
    edition: edition.Edition | None  # of a model made by `create`
    layouts: list[StoredLayout]  # weights that --keep-layout has kept


class PlanDevice(TypedDict):
    name: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    bandwidth: float  # bytes per second
    flops: float  # operations per second
    measured: bool
    source: str


class QuantizationChoice(TypedDict):
    quant: str | None
    dtype: str
    weight_bytes: int
    fits: bool
    most_context: int  # tokens
    ceiling: Speed


class PlannedServing(TypedDict):
    """Users within latency objectives, with --slo."""

    users: int
    think_s: float
    prompt: str  # median and spread
    output: str
    objectives_s: dict[str, float]
    attainment: float
    options: list[ServingOption]  # in the order of their loss of quality, to the first that serves the users
    choice: str | None  # flags of that; null if none does
    devices: int | None  # that the users need with the best setting; null if it serves none


class Arrangement(TypedDict):
    """One way to use the devices."""

    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: bool  # whole experts on each device
    engines: int  # that the devices hold
    fits: bool
    refusal: str | None
    weight_bytes: int | None  # of the process that has most; null if the model cannot be divided so
    cached_tokens: int
    sent_bytes_per_token: float
    ttft_s: float | None
    tpot_s: float | None


class PrefillAdvice(TypedDict):
    """Engines for prompts apart from those for answers."""

    prefill: int  # engines for prompts
    decode: int  # for answers
    requests_per_s: float  # within objectives, simulated
    requests_per_s_together: float  # of as many engines that compute both
    reason: str


class Advice(TypedDict):
    """Ways to use several devices, and which is best."""

    devices: int  # of each machine
    machines: int
    arrangements: list[Arrangement]
    needed: Arrangement | None  # with more devices than there are, if nothing fits
    prefill: PrefillAdvice | None  # with several users, if it serves more than replicas
    command: str | None
    source: str  # of the expected durations


class PlanResult(TypedDict):
    """Estimated memory use and speed of a model: docs/plan.md."""

    model: str
    device: PlanDevice
    stored_as: str | None
    quant: str | None
    dtype: str
    kv_dtype: str
    context: int  # prompt and answer of each user, in tokens
    max_context: int
    users: int
    tensor_parallel: int
    pipeline_parallel: int
    expert_parallel: bool
    prompt: int  # prompt length for TTFT, in tokens
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_token_in_8_bits: int
    kv_bytes_per_token_in_4_bits: int | None  # null if not supported
    kv_bytes_per_sequence: int
    kv_bytes_read: int
    kv_bytes: int
    state_bytes_per_sequence: int
    state_bytes: int
    activation_bytes: int
    total_bytes: int
    allocated_bytes: int | None
    fits: bool
    refusal: str | None  # why it does not fit
    remedy: str | None
    most_context: int
    most_users: int
    engine_users: int
    ceiling: Speed  # limit of memory bandwidth and arithmetic
    expected: Speed | None
    expectation: str | None  # source of the expected speed
    estimate: Estimate | None  # of a GPU that was never measured
    quantizations: list[QuantizationChoice]
    best: str | None
    serving: PlannedServing | None  # with --slo
    advice: Advice | None  # null for a model that fits the only device


class RetainedFile(TypedDict):
    path: str
    bytes: int
    why: str


class RemovedModel(TypedDict):
    """A model removed from the cache."""

    name: str
    repo: str
    revision: str | None
    files: list[str]  # removed paths
    unfinished: int  # removed files of interrupted downloads
    freed_bytes: int  # disk space that is free again
    layout_bytes: int  # of it, of weights that --keep-layout had kept
    kept: list[RetainedFile]
    dry_run: bool  # nothing was removed


class RemovedAlias(TypedDict):
    """An alias made by `cp`."""

    name: str
    alias_of: str
    freed_bytes: Literal[0]
    dry_run: bool


class RemovedQuantization(TypedDict):
    """A cached quantization."""

    name: str
    quant: str
    paths: list[str]
    freed_bytes: int
    dry_run: bool


class RemovedLayout(TypedDict):
    """Weights that --keep-layout had kept."""

    name: str
    paths: list[str]
    freed_bytes: int
    dry_run: bool


class VerifiedFile(TypedDict):
    path: str
    bytes: int
    state: verify.FileState
    fetched_again: bool


class VerifiedModel(TypedDict):
    """Result of verifying one cached model against its digests."""

    name: str
    repo: str
    revision: str | None
    commit: str
    path: str
    files: list[VerifiedFile]


class Alias(TypedDict):
    """An alias and the model that it stands for."""

    name: str
    source: str  # model that it stands for


class CreatedModel(TypedDict):
    """A model made from a Modelfile."""

    name: str
    edition: edition.Edition


class ToolCall(TypedDict):
    id: str
    name: str
    arguments: dict[str, Any]  # as generated by the model


class TokenLogprob(TypedDict):
    token_id: int
    token: str  # its text
    logprob: float | None  # null: minus infinity


class LogprobEntry(TokenLogprob):
    top: list[TokenLogprob]  # the N most likely tokens


class Receipt(TypedDict):
    """Input of `localllm replay`, which recomputes the answer: docs/receipts.md."""

    version: int
    receipt: Annotated[receipt.Receipt, FLATTEN]


class Answer(TypedDict):
    """One answer."""

    model: str
    device: str  # cpu, cuda:0
    dtype: str  # of the computation
    kv_dtype: str  # of the KV cache
    context: int  # context length in tokens
    text: str  # the answer
    reasoning: str  # "" if there is none
    tool_calls: list[ToolCall]
    token_ids: list[int]  # all generated tokens, including reasoning and markup
    finish_reason: Literal["stop", "length"]  # `length`: truncated by --max-tokens or the context
    seed: int | None  # used seed, given or drawn
    metrics: Measurements | None
    receipt: Receipt
    logprobs: NotRequired[list[LogprobEntry]]  # with --logprobs, one per token
    prompt_logprobs: NotRequired[list[LogprobEntry]]  # with --prompt-logprobs, one per token except the first


class SavedConversation(TypedDict):
    """A saved conversation; null if its file is damaged."""

    id: str
    title: str | None
    model: str | None
    began: str | None  # UTC
    changed: str | None  # UTC
    questions: int | None
    bytes: int
    fault: str | None  # why the file cannot be read


class SearchMatch(TypedDict):
    question: int  # from 1; 0: the title or the system prompt
    part: str  # title, system, question, file, thoughts or answer
    before: str
    match: str
    after: str


class ConversationMatch(SavedConversation):
    place: SearchMatch


class DeletedConversation(TypedDict):
    """A conversation that --rm deleted."""

    id: str


class TextEmbedding(TypedDict):
    """Embedding of one text."""

    index: int  # of the text, from 0
    tokens: int
    truncated: int  # tokens that were cut off
    embedding: list[float]


class LoadedModel(TypedDict):
    name: str
    path: str
    device: str
    dtype: str
    kv_dtype: str
    context: int  # tokens
    bytes: int  # weights and cache
    since: float  # seconds since 1970
    until: float | None  # when it is unloaded if idle, in seconds since 1970; null: never
    users: int
    running: int  # running requests
    waiting: int  # queued requests
    blocks: int  # of the KV cache
    used_blocks: int
    cached_blocks: int  # reusable by later requests through prefix caching
    replica: NotRequired[str]  # its number, of a server with replicas


class ServerModels(TypedDict):
    """Models loaded by a server."""

    server: str
    version: str
    models: list[LoadedModel]
    loading: list[str]  # names
    events: list[ModelEvent]


class WatchedModel(TypedDict):
    snapshot: Annotated[ModelSnapshot, FLATTEN]
    pace: Throughput | None  # null: loaded during the interval


class ServerOverview(TypedDict):
    """Snapshot of a server, as `top` prints it."""

    snapshot: Annotated[ServerSnapshot, FLATTEN]
    models: list[WatchedModel]


class StoppedModel(TypedDict):
    """A model that is unloaded, or will be."""

    name: str
    users: int  # running answers, which finish first


class ReplayResult(TypedDict):
    """Comparison of a recomputed answer with its receipt."""

    identical: bool
    replayed: Annotated[Replayed, FLATTEN]
    margin: float | None  # log probability of the original token minus that of the new one


class BatchSummary(TypedDict):
    """Summary of a batch: tokens and times of this run, lines of the whole file."""

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


class CheckedFigure(TypedDict):
    predicted: float | None
    measured: float | None
    error: float | None  # relative, of the prediction


class SimulationCheck(TypedDict):
    """Comparison of a simulation with a running server, with --check."""

    url: str
    model: str
    date: str
    step_times: str
    requests: int  # answered
    failed: int
    late_p99_s: float  # how late the client sent requests
    figures: dict[str, CheckedFigure]


class SimulatedLoad(TypedDict):
    rate: float | None  # requests or conversations per second
    burstiness: float
    users: int | None
    think_s: float
    turns: int
    system: int  # tokens
    prompt: str  # median and spread
    output: str
    trace: str | None  # format
    speed: float
    seed: int


class SimulatedPercentiles(TypedDict):
    p50: float | None
    p95: float | None
    p99: float | None


class SimulatedCapacity(TypedDict):
    amount: float  # the highest load within the objectives; 0 if none is
    at_least: bool  # the load has too few requests to find more
    unit: Literal["users", "requests/s", "speed"]
    runs: int  # simulations of the search


class AlternativeSetting(TypedDict):
    flags: str
    attainment: float | None  # null: it does not fit
    serves: bool


class LoadRequirement(TypedDict):
    """What a load above the capacity takes."""

    replicas: int | None  # null: no number that was tried
    alternatives: list[AlternativeSetting]


class Simulation(TypedDict):
    """A simulated load: docs/simulate.md."""

    model: str
    device: str
    quant: str | None
    dtype: str
    kv_dtype: str
    step_times: str  # where durations of steps are from, and their error
    engine: EngineSetup
    load: SimulatedLoad
    requests: int  # answered
    refused: int
    duration_s: float  # simulated
    steps: int
    queue_s: SimulatedPercentiles
    ttft_s: SimulatedPercentiles
    tpot_s: SimulatedPercentiles
    itl_s: SimulatedPercentiles
    e2e_s: SimulatedPercentiles
    requests_per_s: float | None
    output_tokens_per_s: float | None
    prompt_tokens: int
    cached_tokens: int
    host_tokens: int  # of these, from main memory
    disk_tokens: int  # and from the disk
    moved_bytes: float  # between device and main memory
    disk_written_bytes: float
    disk_read_bytes: float
    disk_unwritten_bytes: float  # left out, as the disk was too slow
    slower_loads: int  # prefixes that were computed, as that was faster
    output_tokens: int
    draft_tokens: int
    accepted_tokens: int
    preemptions: int
    most_running: int
    most_waiting: int
    busy: float  # share of the time in which a step ran
    bandwidth_share: float | None  # of the published bandwidth; null for measured steps
    flops_share: float | None
    objectives_s: dict[str, float] | None
    attainment: float | None
    met: int | None  # requests that met all objectives
    goodput_requests_per_s: float | None
    price_per_hour: float | None
    price_source: str | None  # the price with its source and date
    cost_per_million_tokens: float | None
    watts: float | None
    joules_per_token: float | None
    capacity: SimulatedCapacity | None
    requirement: LoadRequirement | None  # of a load above the capacity
    replicas: list[ReplicaUse]
    failed: int  # answers that broke off
    retried: int  # requests that were sent again
    transfers: int  # of keys and values from prefill to decode replicas
    transferred_bytes: float
    transfer_s: float
    sensitivity: list[Sensitivity]
    wall_s: float  # that the simulation took


class PromptToken(TypedDict):
    id: int
    text: str
    kind: Literal["control", "added", "text"]  # `added`: an added token of the tokenizer


class RenderedPrompt(TypedDict):
    """The rendered prompt of a conversation."""

    prompt: str
    token_ids: list[int]
    tokens: list[PromptToken]


class StoredPrompts(TypedDict):
    """Computed prompts of one model in one data type."""

    model: str
    dtype: str
    kv_dtype: str
    files: int
    tokens: int
    bytes: int
    last_used: float  # seconds since 1970


class CacheContent(TypedDict):
    """Answer of `cache list`."""

    path: str
    models: list[StoredPrompts]


class ClearedCache(TypedDict):
    """Answer of `cache clear`."""

    path: str
    freed_bytes: int


class VerifiedCache(TypedDict):
    """Answer of `cache verify`."""

    path: str
    checked: int  # files
    removed: list[str]  # names of damaged ones


class MachineHealth(TypedDict):
    """State of a machine, and findings."""

    fine: bool  # `localllm run` works
    examination: Annotated[Examination, FLATTEN]
    findings: list[Finding]


class ClusterMachine(TypedDict):
    node: str  # the beginning of its id
    id: str
    host: str
    is_head: bool
    state: Literal["ready", "left"]
    cpus: float
    gpus: float
    gpus_in_use: float


class ClusterStatus(TypedDict):
    """Answer of `cluster status`."""

    head: str  # HOST:PORT
    machines: list[ClusterMachine]


class JsonOutput(NamedTuple):
    stdout: Literal["object", "array", "lines"]  # `lines`: one object per line
    type: Any  # of the object, or of each object


JSON_OUTPUTS = {
    "run": JsonOutput("object", Answer),
    "chats": JsonOutput("array", SavedConversation | ConversationMatch | DeletedConversation),
    "embed": JsonOutput("lines", TextEmbedding),
    "ps": JsonOutput("object", ServerModels),
    "top": JsonOutput("object", ServerOverview),
    "stop": JsonOutput("object", StoppedModel),
    "replay": JsonOutput("object", ReplayResult),
    "pull": JsonOutput("lines", PullBegin | PullProgress | PullNote | PullVerified | PullDone),
    "list": JsonOutput("array", ModelSummary),
    "show": JsonOutput("object", ModelDetails),
    "plan": JsonOutput("object", PlanResult),
    "simulate": JsonOutput("object", Simulation | SimulationCheck),
    "bench": JsonOutput("object", Benchmark | LoadTest),
    "quantize": JsonOutput("lines", QuantizeProgress | QuantizedModel),
    "diff": JsonOutput("object", QualityReport),
    "batch": JsonOutput("object", BatchSummary),
    "rm": JsonOutput("array", RemovedModel | RemovedAlias | RemovedQuantization | RemovedLayout),
    "verify": JsonOutput("array", VerifiedModel),
    "cache": JsonOutput("object", CacheContent | ClearedCache | VerifiedCache),
    "cp": JsonOutput("object", Alias),
    "create": JsonOutput("object", CreatedModel),
    "template": JsonOutput("object", RenderedPrompt),
    "doctor": JsonOutput("object", MachineHealth),
    "cluster": JsonOutput("object", ClusterStatus),
}
