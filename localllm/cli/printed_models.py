"""What the commands print with `--json` that get, keep and describe models, as types; see `printed.py`."""

from typing import Annotated, Any, Literal

from typing_extensions import TypedDict  # Pydantic takes no other before Python 3.12

from localllm.checkpoint.facts import Format
from localllm.cli.models import State
from localllm.cli.printed_bench import FLATTEN
from localllm.hub import verify
from localllm.modelfile.edition import Edition
from localllm.plan.speed import Speed
from localllm.quality.report import Quality


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
    edition: Edition | None  # of a name that `create` made


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
    state: verify.State
    fetched_again: bool


class Checked(TypedDict):
    """A model of the cache, compared with its digests."""

    name: str
    repo: str
    revision: str | None
    commit: str
    path: str
    files: list[CheckedFile]


class Named(TypedDict):
    """A name that was given."""

    name: str
    source: str  # what it stands for


class Created(TypedDict):
    """An edition that was made."""

    name: str
    edition: Edition
