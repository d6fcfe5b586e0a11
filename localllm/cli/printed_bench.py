"""What `localllm bench --json` prints, and the measurements of one answer, as types; see `json_schemas.py`."""

from typing import Annotated, Literal

from typing_extensions import TypedDict  # Pydantic takes no other before Python 3.12

from localllm.benchmark.ceilings import Ceilings
from localllm.benchmark.load.drive import Load
from localllm.benchmark.machine import Machine, Noise
from localllm.benchmark.ratio import Ratio
from localllm.benchmark.result import Loaded
from localllm.benchmark.roofline import Bound, Roofline
from localllm.benchmark.scenario import Scenario

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
    loaded: Annotated[Loaded, FLATTEN]
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
