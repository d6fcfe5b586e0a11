"""Every error a user can meet: one sentence with the remedy, an exit code and an HTTP status.

    LocalLLMError            exit 1   500   a fault of localllm
    ├── UsageError           exit 2   400   an invalid option, parameter or request
    ├── PromptRefused        exit 2   400   the same, with words of the prompt in its message
    ├── ParameterOutOfRange  exit 2   400   a sampling parameter outside its range
    ├── BadField             exit 2   400   an invalid field of a request body
    ├── WrongDigest          exit 2   400   an upload whose content does not match its digest
    ├── DoesNotFit           exit 3   507   not enough memory for the weights or the context
    ├── DiskFull             exit 3   507   not enough free space on the disk
    ├── NotWritable          exit 3   507   a folder that cannot be written to
    ├── NoSuchDevice         exit 3   400   the requested device is not in this machine
    ├── ContextOverflow      exit 4   400   the prompt is longer than the context
    ├── OutputInvalid        exit 5   500   the answer does not match its schema or grammar
    ├── StoppedByLength      exit 6   500   a limit cut the answer, under `--fail-on-length`
    ├── DamagedModel         exit 7   500   a model's file is truncated, inconsistent or holds NaN
    ├── NetworkError         exit 7   502   the hub cannot be reached, or sends something unexpected
    ├── ServerUnreachable    exit 7   502   no server answers at the address, or not in time
    ├── ServerTooSlow        exit 7   502   a server accepts the connection and does not reply in time
    ├── NotLocalLLMServer    exit 7   502   the server at the address is not localllm
    ├── AccessDenied         exit 8   403   the hub requires a login or accepted terms, or a server a key
    ├── ModelNotFound        exit 8   404   no model of that name
    ├── UnsupportedModel     exit 8   400   a family or file format that localllm does not run
    ├── Busy                 exit 1   503   no capacity for this request now
    ├── QueueFull            exit 1   503   too many requests are waiting
    ├── EngineFailed         exit 1   503   a GPU failed, and with it everything this process has on it
    ├── RankFailed           exit 1   503   a process that computes a part of a model has ended
    ├── ReplicaLost          exit 1   503   a replica has ended before its answer
    ├── MissingKey           exit 1   401   a request without a valid API key
    ├── OriginRefused        exit 1   403   a request for another host, or from a page of another origin
    ├── NoSuchRoute          exit 1   500   an unknown path or method; carries the router's status
    ├── UnknownResponse      exit 1   404   `previous_response_id` names no stored response
    ├── MalformedRequest     exit 1   500   not an HTTP request; carries its own status
    ├── BodyTooLarge         exit 1   413   a request body over the limit
    ├── BodyTooSlow          exit 1   408   a request body that does not arrive in time
    ├── ReaderTooSlow        exit 1   408   a client that does not read its answer
    ├── ClientLeft           exit 1   499   the client disconnected
    ├── NotSupported         exit 1   501   a route of another server that localllm does not offer
    ├── LinesFailed          exit 9   500   some lines of a batch failed
    └── NotReproduced        exit 10  500   `localllm replay` got another answer

Code and status belong to the class, so no other file holds a table of them. Exit 130: interrupted.
"""

import difflib
from collections.abc import Iterable
from typing import Protocol

# Replacements of control characters in untrusted text of the Hub, files and models, which must not move the
# cursor, set the terminal's title or end a line of the log: ESC is shown as ␛ and so on.
CONTROL_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"} | {0x7F: 0x2421}
CONTROL_PICTURES |= {code: 0xFFFD for code in range(0x80, 0xA0)}
ONE_LINE_PICTURES = CONTROL_PICTURES | {ord("\t"): " ", ord("\n"): " ", 0x2028: " ", 0x2029: " "}


class LocalLLMError(Exception):
    """`message` says what is wrong, `remedy` what to do about it, each on one line without control characters;
    `str()` joins them with a semicolon."""

    exit_code = 1
    http_status = 500

    def __init__(self, message: str, remedy: str | None = None):
        self.message = message.translate(ONE_LINE_PICTURES)
        self.remedy = remedy.translate(ONE_LINE_PICTURES) if remedy else remedy
        super().__init__(f"{self.message}; {self.remedy}" if self.remedy else self.message)


class UsageError(LocalLLMError):
    """An invalid option, parameter or request."""

    exit_code = 2
    http_status = 400


class ParameterOutOfRange(UsageError):
    """A value of SamplingParams outside its range; `name` is the field."""

    def __init__(self, name: str, message: str, remedy: str):
        super().__init__(message, remedy)
        self.name = name


class PromptRefused(UsageError):
    """A UsageError whose message may quote the prompt, so it is sent to the client and never logged."""


class BadField(UsageError):
    """An invalid field of a request body. `param` is its path, for example `messages.0.role`."""

    def __init__(self, param: str, message: str, remedy: str | None = None):
        super().__init__(message, remedy)
        self.param = param


class WrongDigest(UsageError):
    """An upload whose content does not match its digest."""


class DoesNotFit(LocalLLMError):
    """Not enough memory for the weights or the requested context."""

    exit_code = 3
    http_status = 507


class DiskFull(LocalLLMError):
    """Not enough free space on the disk."""

    exit_code = 3
    http_status = 507


class NotWritable(LocalLLMError):
    """A folder that cannot be written to: it, or its disk, is read-only or belongs to another user."""

    exit_code = 3
    http_status = 507


class NoSuchDevice(LocalLLMError):
    """The requested device is not in this machine; there is no silent fallback."""

    exit_code = 3
    http_status = 400


class ContextOverflow(LocalLLMError):
    """The prompt is longer than the context. Carries both numbers; at_least: `prompt_tokens` is a lower bound."""

    exit_code = 4
    http_status = 400

    def __init__(self, prompt_tokens: int, context: int, remedy: str, *, at_least: bool = False):
        count = f"at least {prompt_tokens}" if at_least else prompt_tokens
        super().__init__(f"the prompt has {count} tokens and the context holds {context}", remedy)
        self.prompt_tokens = prompt_tokens
        self.context = context


class OutputInvalid(LocalLLMError):
    """The answer does not match its schema or grammar: a limit or stop string cut it, or the mask was less strict
    than the schema. The request was valid, so the status is a server error."""

    exit_code = 5


class StoppedByLength(LocalLLMError):
    """max_tokens or the context cut the answer, and the caller requested an error in that case."""

    exit_code = 6


class NotReproduced(LocalLLMError):
    """An answer recomputed from its receipt differs."""

    exit_code = 10


class DamagedModel(LocalLLMError):
    """A file of the model is truncated, contradicts another, or holds NaN or infinite weights."""

    exit_code = 7


class NetworkError(LocalLLMError):
    """The Hub cannot be reached, repeatedly interrupts transfers, or sends unexpected content."""

    exit_code = 7
    http_status = 502


class ServerUnreachable(LocalLLMError):
    """No server answers at the address, or not in time."""

    exit_code = 7
    http_status = 502


class ServerTooSlow(ServerUnreachable):
    """A server accepted the connection and did not answer in time."""


class NotLocalLLMServer(LocalLLMError):
    """The server at the address is not localllm."""

    exit_code = 7
    http_status = 502


class AccessDenied(LocalLLMError):
    """The Hub requires a login or accepted terms, or a localllm server an API key."""

    exit_code = 8
    http_status = 403


class ModelNotFound(LocalLLMError):
    """No model, folder or file of that name."""

    exit_code = 8
    http_status = 404


class UnsupportedModel(LocalLLMError):
    """A family, a quantization or a file format that localllm does not run."""

    exit_code = 8
    http_status = 400


class Busy(LocalLLMError):
    """No capacity for this request now. `retry_after`: seconds until a retry is reasonable."""

    http_status = 503

    def __init__(self, message: str, remedy: str = "try again later", retry_after: int = 5):
        super().__init__(message, remedy)
        self.retry_after = retry_after


class WaitForecast(Protocol):
    """Predicts how long a full queue refuses requests."""

    @property
    def is_fresh(self) -> bool:
        """Whether `retry_after` needs no `refresh`."""
        ...

    def refresh(self) -> None:
        """Compute a prediction, which takes up to a tenth of a second."""
        ...

    def retry_after(self) -> int:
        """Return the seconds after which a refused request should be sent again."""
        ...


class QueueFull(Busy):
    """Too many requests are waiting. `forecast` predicts `retry_after`."""

    def __init__(self, message: str, forecast: WaitForecast):
        super().__init__(message)
        self.forecast = forecast


class EngineFailed(LocalLLMError):
    """A GPU failed, and with it everything that this process has on it."""

    http_status = 503


class RankFailed(LocalLLMError):
    """One of the processes that compute a model together has ended, and with it the model."""

    http_status = 503


class ReplicaLost(LocalLLMError):
    """A replica has ended before its answer, or cannot be reached."""

    http_status = 503


class MissingKey(LocalLLMError):
    """A request without a valid API key."""

    http_status = 401

    def __init__(self, message: str) -> None:
        super().__init__(message, "send Authorization: Bearer KEY, or x-api-key: KEY")


class OriginRefused(LocalLLMError):
    """A request that names another host, or comes from a page of another origin."""

    http_status = 403


class NoSuchRoute(LocalLLMError):
    """An unknown path or method; the router chooses the status."""

    def __init__(self, message: str, remedy: str, http_status: int):
        super().__init__(message, remedy)
        self.http_status = http_status


class UnknownResponse(LocalLLMError):
    """`previous_response_id` names a response that was not stored, or was evicted."""

    http_status = 404


class MalformedRequest(LocalLLMError):
    """Bytes that are not an HTTP request, or a request that does not arrive in time."""

    def __init__(self, message: str, http_status: int = 400):
        super().__init__(message, "send a valid HTTP/1.1 request")
        self.http_status = http_status


class BodyTooLarge(LocalLLMError):
    """A request body over the limit."""

    http_status = 413

    def __init__(self, limit: int) -> None:
        """limit: bytes"""
        super().__init__(f"the body is larger than {limit / 2**20:.4g} MiB", "send a smaller one")


class BodyTooSlow(LocalLLMError):
    """A request body that does not arrive in time."""

    http_status = 408


class ReaderTooSlow(LocalLLMError):
    """A client that does not read its answer."""

    http_status = 408


class ClientLeft(LocalLLMError):
    """The client disconnected before there was a response."""

    http_status = 499


class NotSupported(LocalLLMError):
    """A route of another server that localllm does not offer."""

    http_status = 501


class LinesFailed(LocalLLMError):
    """A batch has finished, and some of its lines failed."""

    exit_code = 9


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return a remedy for an unknown name: the most similar choice, if any."""
    similar = difflib.get_close_matches(name[:80], choices, n=1)
    return f"did you mean {similar[0]}?" if similar else "leave it out"
