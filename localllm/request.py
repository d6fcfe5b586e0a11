"""Requests and results of a model, as plain data: the types between the engine and all interfaces."""

import itertools
import json
import math
import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, SupportsIndex, cast

from localllm.errors import DamagedModel, ParameterOutOfRange, UsageError
from localllm.metrics import Metrics, StepReport

SEED_LIMIT = 2**63
SEED_BITS = 53  # of a random seed: the integers that JSON readers represent exactly
MAX_COUNT = 2**31 - 1
MAX_LOGIT_BIAS = 10_000
MIN_TEMPERATURE = 1e-5  # below it, differences of logits overflow
MAX_TOP_LOGPROBS = 64
MAX_GRAMMAR_LEN = 2**15  # characters; compiling a chain of names takes quadratic time
MAX_SCHEMA_LEN = 2**18
MAX_SCHEMA_DEPTH = 64  # nesting levels of a schema


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # an end-of-sequence token, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ERROR = "error"


class EventType(StrEnum):
    """The type of an event's text."""

    CONTENT = "content"  # the answer itself
    REASONING = "reasoning"  # before the answer
    TOOL_CALL = "tool_call"


def _is_number(value: Any, types: tuple[type[int] | type[float], ...], low: float, high: float) -> bool:
    """Whether a value is a number in a range; NaN never is."""
    return isinstance(value, types) and not isinstance(value, bool) and low <= value <= high


class GrammarKind(StrEnum):
    """The language of a grammar."""

    JSON_SCHEMA = "json_schema"
    JSON = "json"  # any object; without text
    REGEX = "regex"  # of the whole answer, in the syntax of Rust's `regex`: no look-around, no back-references
    LARK = "lark"  # llguidance's dialect, starting with `start`
    GBNF = "gbnf"  # of llama.cpp, starting with `root`
    CHOICE = "choice"  # a JSON array of texts


GRAMMAR_NAMES = {
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.JSON: "JSON object",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.LARK: "Lark grammar",
    GrammarKind.GBNF: "GBNF grammar",
    GrammarKind.CHOICE: "list of choices",
}


@dataclass(frozen=True)
class Grammar:
    """A constraint on the content of an answer. Raises UsageError for text that is not of its kind; compiling it
    (`text/grammar`) checks whether it can be enforced."""

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in list(GrammarKind):
            raise UsageError(f"there is no grammar of the kind {self.kind!r}", f"give {', '.join(GrammarKind)}")
        kind = GrammarKind(self.kind)
        object.__setattr__(self, "kind", kind)
        if not isinstance(self.text, str) or (self.text and kind is GrammarKind.JSON):
            raise UsageError(f"the text of the {kind} grammar is {self.text!r}", "give a string; json has none")
        if not self.text.strip() and kind is not GrammarKind.JSON:
            raise UsageError(f"the {GRAMMAR_NAMES[kind]} is empty", "describe the answers")
        limit = MAX_SCHEMA_LEN if kind in (GrammarKind.JSON_SCHEMA, GrammarKind.CHOICE) else MAX_GRAMMAR_LEN
        if len(self.text) > limit:
            raise UsageError(
                f"the {GRAMMAR_NAMES[kind]} has {len(self.text):,} characters", f"the limit is {limit:,}"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"character {error.start} of the {GRAMMAR_NAMES[kind]} is a lone surrogate"
            ) from error
        if kind is GrammarKind.JSON_SCHEMA:
            _ = self.schema  # checks it
        if kind is GrammarKind.CHOICE:
            _ = self.choices

    @property
    def schema(self) -> Any:
        """The parsed text of a JSON schema: an object, true or false."""
        content = self._parse_json()
        if not isinstance(content, dict | bool):
            raise UsageError(f"the JSON schema is {self.text[:80]!r}", "give an object")
        if nesting_depth(content) > MAX_SCHEMA_DEPTH:
            raise UsageError(f"the JSON schema is nested more than {MAX_SCHEMA_DEPTH} deep", "use $defs and $ref")
        return content

    @property
    def choices(self) -> list[str]:
        """The strings of a choice."""
        texts = self._parse_json()
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise UsageError(f"the choices are {self.text[:80]!r}", "give a list of non-empty strings")
        if any(0xD800 <= ord(letter) < 0xE000 for text in texts for letter in text):
            raise UsageError("a choice contains a lone surrogate", "send valid Unicode")
        return texts

    def _parse_json(self) -> Any:
        try:
            return json.loads(self.text, parse_constant=_reject_constant)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the {GRAMMAR_NAMES[self.kind]} is not JSON ({error})") from None


def _reject_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def nesting_depth(content: Any) -> int:
    """Return the nesting depth of a JSON value, without recursion, as it may exceed the stack."""
    levels, level = 0, [content]
    while level:
        levels += 1
        objects = [tuple(part.values()) for part in level if isinstance(part, dict)]
        level = list(itertools.chain(*objects, *(part for part in level if isinstance(part, list))))
    return levels


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for sampling tokens and for ending an answer.

    The defaults are the model's own distribution (temperature 1, nothing filtered). Order of operations, as
    in `transformers`: logit_bias, repetition/presence/frequency penalty, temperature, top_k, top_p, min_p.
    Raises UsageError for invalid values.
    """

    temperature: float = 1.0
    """Divides the logits; 0 selects the most likely token (greedy)."""

    top_k: int = 0
    """Keep the k most likely tokens, and those equal to the k-th; 0 keeps all."""

    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to top_p (Holtzman et al. 2019)."""

    min_p: float = 0.0
    """Keep tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024)."""

    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of tokens seen in prompt and answer (Keskar et al. 2019)."""

    repeat_last_n: int = -1
    """Number of last tokens that repetition_penalty considers; -1: all."""

    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already in the answer."""

    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each of its occurrences in the answer."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids; -inf excludes one."""

    seed: int | None = None
    """The same seed gives the same text in any batch. None: random, and reported in Completion.seed."""

    max_tokens: int | None = None
    """Maximum tokens of the answer; None: until the context is full."""

    min_tokens: int = 0
    """Before this many tokens no end-of-sequence token, stop id or stop string ends the answer; a grammar may."""

    stop: tuple[str, ...] = ()
    """The answer ends before the first of these strings, which is not part of it."""

    stop_ids: tuple[int, ...] = ()
    """Token ids that end the answer, in addition to the model's end-of-sequence tokens."""

    ignore_eos: bool = False
    """Continue past the model's end-of-sequence tokens (for measurements)."""

    logprobs: int | None = None
    """Return log probabilities of each token and this many most likely alternatives; 0: of the token alone."""

    prompt_logprobs: int | None = None
    """The same for each prompt token except the first."""

    grammar: Grammar | None = None
    """Constrains the content of the answer, but not its reasoning."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or not isinstance(self.stop, Sequence):
            raise UsageError(f"stop is {self.stop!r}", "give a list of strings")
        if not isinstance(self.stop_ids, Sequence):
            raise UsageError(f"stop_ids is {self.stop_ids!r}", "give a list of token ids")
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias is {self.logit_bias!r}", "give a dictionary of token id and number")
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos is {self.ignore_eos!r}", "give True or False")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise UsageError(f"grammar is {self.grammar!r}", "give a Grammar")
        if self.grammar and self.ignore_eos:
            raise UsageError("ignore_eos cannot be used with a grammar", "leave one of them out")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        number, integer = (int, float), (int,)
        self._check_range("temperature", number, 0, 1000)
        self._check_range("top_k", integer, 0, MAX_COUNT)
        if 0 < self.temperature < MIN_TEMPERATURE:
            remedy = f"give 0, or at least {MIN_TEMPERATURE}"
            raise ParameterOutOfRange("temperature", f"temperature is {self.temperature!r}", remedy)
        self._check_range("top_p", number, 0, 1, exclusive_low=True)
        self._check_range("min_p", number, 0, 1)
        self._check_range("repetition_penalty", number, 0.01, 100)
        self._check_range("repeat_last_n", integer, -1, MAX_COUNT)
        self._check_range("presence_penalty", number, -100, 100)
        self._check_range("frequency_penalty", number, -100, 100)
        self._check_range("seed", integer, 0, SEED_LIMIT - 1, optional=True)
        self._check_range("max_tokens", integer, 0, MAX_COUNT, optional=True)
        self._check_range("min_tokens", integer, 0, MAX_COUNT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterOutOfRange(
                "min_tokens",
                f"min_tokens is {self.min_tokens} and max_tokens is {self.max_tokens}",
                "give a min_tokens of at most max_tokens",
            )
        self._check_range("logprobs", integer, 0, MAX_TOP_LOGPROBS, optional=True)
        self._check_range("prompt_logprobs", integer, 0, MAX_TOP_LOGPROBS, optional=True)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise UsageError("a stop string is empty or not a string", "leave it out")
        for token in (*self.stop_ids, *self.logit_bias):
            if type(token) is not int or token < 0:
                raise UsageError(f"stop_ids and logit_bias name the token {token!r}", "give token ids from 0")
        for token, bias in self.logit_bias.items():
            if bias != -math.inf and not _is_number(bias, number, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS):
                raise UsageError(
                    f"logit_bias of token {token} is {bias!r}", f"give -inf or a number up to {MAX_LOGIT_BIAS}"
                )

    @property
    def uses_penalties(self) -> bool:
        """Whether penalties make sampling depend on the previous tokens."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)

    def _check_range(
        self,
        name: str,
        types: tuple[type[int] | type[float], ...],
        low: float,
        high: float,
        *,
        exclusive_low: bool = False,
        optional: bool = False,
    ) -> None:
        """Raise ParameterOutOfRange unless the field is from `low` to `high`, without `low` if it is exclusive."""
        value: Any = getattr(self, name)
        if value is None and optional:
            return
        if not _is_number(value, types, low, high) or (exclusive_low and value == low):
            kind = "whole number" if types == (int,) else "number"
            raise ParameterOutOfRange(
                name,
                f"{name} is {repr(value)[:60]}",
                f"give a {kind} {'above' if exclusive_low else 'from'} {low:,} to {high:,}",
            )

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingParams":
        """Return the recommendation in a model's generation_config.json. Raises DamagedModel for invalid
        values."""
        known = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
        chosen = {name: value for name, value in config.items() if name in known and value is not None}
        if config.get("do_sample") is False:
            chosen["temperature"] = 0.0
        try:
            return cls(**chosen)
        except UsageError as error:
            raise DamagedModel(f"in generation_config.json {error.message}", "fetch the model again") from None


@dataclass(frozen=True)
class ToolUse:
    """The tools that a model may or must call. By default the model decides."""

    required: bool = False
    """It must call a tool."""

    name: str | None = None
    """It must call this tool."""

    parallel: bool = True
    """It may call several tools in one answer."""

    allowed: tuple[str, ...] = ()
    """It may only call these tools; empty: all."""

    @property
    def must_call(self) -> bool:
        return self.required or self.name is not None


@dataclass(frozen=True)
class TokenLogprob:
    """A token and the most likely ones at its position, under the model's own distribution."""

    token_id: int
    logprob: float  # natural logarithm
    top: tuple[tuple[int, float], ...]  # (token id, log probability), most likely first


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChatRequest:
    """A prompt and its options as a user gave them; all interfaces translate to it."""

    prompt: Prompt
    """Text and token ids are continued as they are; messages are rendered by the model's chat template."""

    params: SamplingParams | None = None
    """None: the recommendation of the model or its edition."""

    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions that the model may call, in OpenAI's format."""

    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the chat template, which must support them."""

    think: bool | None = None
    """Turn the model's reasoning on or off; None leaves it to the chat template."""

    tool_use: ToolUse = ToolUse()

    before: Sequence[int] = ()
    """Token ids that precede the prompt."""

    priority: int = 0
    """See Request.priority."""

    context: int | None = None
    """See Request.context."""

    inspect: int | None = None
    """See Request.inspect."""

    keep: bool = False
    """See Request.keep."""

    slot: int | None = None
    """See Request.slot."""

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a list of messages."""
        parts = self.prompt if isinstance(self.prompt, list | tuple) else ()
        return bool(parts) and all(isinstance(part, Mapping) for part in parts)


_request_ids = itertools.count(1)
MAX_SLOTS = 256  # that requests of a client can name
CACHE_SCOPE: ContextVar[str] = ContextVar("cache_scope", default="")
"""The scope of the requests that are being prepared: a server has one for each API key, unless they share."""
CLIENT: ContextVar[str] = ContextVar("client", default="")
"""Who sends the requests that are being prepared: a digest of the API key."""


class PrefixNames(NamedTuple):
    """Names of the prefixes of a prompt, for a router."""

    names: Sequence[Hashable] = ()  # evenly spaced, the shortest first
    share: float = 1.0  # of the prompt that the longest covers


NO_NAMES = PrefixNames()
PREFIX_NAMES: ContextVar[PrefixNames] = ContextVar("prefix_names", default=NO_NAMES)
"""Names of the prefixes of the request that is being prepared."""


@dataclass(frozen=True)
class Request:
    """A prompt as token ids, ready for the engine. `arrival` is in seconds of `time.perf_counter()`."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival: float
    is_chat: bool = False
    """Whether messages were rendered; then reasoning and tool calls are parsed in the answer."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """The functions in the prompt."""

    priority: int = 0
    """Waiting requests with a higher priority start first; equal ones in order of arrival."""

    context: int | None = None
    """Maximum tokens of prompt and answer together; None: the model's context."""

    tool_use: ToolUse = ToolUse()

    inspect: int | None = None
    """Number of candidates per token in the reports of every step, including prefill; None for no reports."""

    keep: bool = False
    """Store its keys and values on the disk when it ends, if there is a disk tier."""

    cache_scope: str = ""
    """Only requests of the same scope share cached prefixes."""

    client: str = ""
    """Who has sent it: each client has slots of its own."""

    slot: int | None = None
    """Number of the slot that remembers its tokens; None: the lowest idle one."""

    prefix_names: PrefixNames = NO_NAMES
    """For the router that has chosen this engine: see `PrefixJournal`."""

    id: int = field(default_factory=lambda: next(_request_ids))

    def __post_init__(self) -> None:
        if self.inspect is not None and not _is_number(self.inspect, (int,), 0, MAX_TOP_LOGPROBS):
            raise UsageError(f"inspect is {self.inspect!r}", f"give a whole number up to {MAX_TOP_LOGPROBS}")

    def with_choice_index(self, index: int) -> "Request":
        """Return a copy for the choice at `index`, with a seed derived from this one's."""
        seed = self.params.seed
        if seed is not None:
            import hashlib  # imported late, as it loads OpenSSL

            digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
            seed = int.from_bytes(digest[:8]) >> (64 - SEED_BITS)
        return replace(self, params=replace(self.params, seed=seed), id=next(_request_ids))


@dataclass(frozen=True)
class ToolCall:
    """A function call requested by the model."""

    name: str
    arguments: str  # a JSON object
    id: str = ""  # "" until the worker assigns one, if the model did not


@dataclass(frozen=True)
class GenerationEvent:
    """A part of an answer. The joined texts of a kind are the whole; the last event has finish_reason and metrics.

    A token may end one kind and begin another; then its first event has its id and log probability.
    """

    request_id: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    metrics: Metrics | None = None
    seed: int | None = None
    kind: EventType = EventType.CONTENT
    tool_call: ToolCall | None = None  # for TOOL_CALL, whose text is empty
    drafted: int = 0  # draft tokens verified by the step, in its first event
    accepted: bool = False  # whether the token was a draft token
    stop_string: str | None = None  # of `stop`, if it ended the answer; with finish_reason
    step: StepReport | None = None  # if requested, in the first event of a step


@dataclass(frozen=True)
class Completion:
    """A complete answer."""

    text: str  # the content alone
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    metrics: Metrics
    seed: int
    prompt_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None  # of `stop`, if it ended the answer


def require_int(name: str, value: object, minimum: int | None = None) -> int:
    """Return the value. Raises UsageError if it is not an integer or less than `minimum`."""
    if type(value) is not int or (minimum is not None and value < minimum):
        raise UsageError(
            f"{name} is {value!r}", "give a whole number" + ("" if minimum is None else f" from {minimum}")
        )
    return value


def to_token_ids(prompt: object) -> list[int]:
    """Return a list of integers from any iterable of int, numpy or torch integers.

    Raises UsageError for anything else, including bytes and booleans.
    """
    try:
        if isinstance(prompt, bytes | bytearray | Mapping):
            raise TypeError
        parts = list(cast(Iterable[SupportsIndex], prompt))
        if any(isinstance(part, bool) for part in parts):
            raise TypeError
        return [operator.index(part) for part in parts]
    except TypeError:
        raise UsageError(
            "the prompt is neither text nor token ids nor messages", "give one of the three"
        ) from None
