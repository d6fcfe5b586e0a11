"""Every error a user can meet: one sentence with the remedy, an exit code and an HTTP status.

    LocalLLMError            exit 1   500   a fault of ours
    ├── UsageError           exit 2   400   an option or a request that makes no sense
    ├── PromptRefused        exit 2   400   the same of a prompt, some of whose words it may have
    ├── ParameterOutOfRange  exit 2   400   a sampling parameter outside its range
    ├── DoesNotFit           exit 3   507   not enough memory for the weights or the context
    ├── DiskFull             exit 3   507   not enough room on the disk for a download
    ├── NotWritable          exit 3   507   a folder in which nothing may be written
    ├── NoSuchDevice         exit 3   400   the device that was asked for is not here
    ├── ContextOverflow      exit 4   400   the prompt is longer than the context
    ├── OutputInvalid        exit 5   500   the answer is not what a schema or grammar asked for
    ├── StoppedByLength      exit 6   500   `--fail-on-length`, and the answer was cut by a limit
    ├── DamagedModel         exit 7   500   a model's file is truncated, inconsistent or holds NaN
    ├── NetworkError         exit 7   502   the hub cannot be reached, or does not send what it announced
    ├── AccessDenied         exit 8   403   the hub gives a model only to those who log in or accept its terms
    ├── ModelNotFound        exit 8   404   no model of that name
    ├── UnsupportedModel     exit 8   400   a family or file format that localllm does not run
    ├── Busy                 exit 1   503   no room for this request now, later there may be
    ├── LinesFailed          exit 9   500   a batch is done, and some of its lines have failed
    └── NotReproduced        exit 10  500   `localllm replay`, and the answer is another

Code and status belong to the class, so no other file holds a table of them. Exit 130: interrupted.
"""

import difflib
from collections.abc import Iterable


# What was meant by a name that nobody knows. Knows no names itself.
def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The remedy: the name that is spelt alike, or none."""
    near = difflib.get_close_matches(name[:80], choices, n=1)
    return f"did you mean {near[0]}?" if near else "leave it out"


# The words of strangers, as a hub, a file and a model write them: shown as what they are, never obeyed. They must
# not move the cursor, set the title, or end the line of a log: ESC is shown as ␛ and so on.
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
    """An option, a parameter or a request that makes no sense."""

    exit_code = 2
    http_status = 400


class ParameterOutOfRange(UsageError):
    """A value of SamplingParams outside its range; `name` is the field."""

    def __init__(self, name: str, message: str, remedy: str):
        super().__init__(message, remedy)
        self.name = name


class PromptRefused(UsageError):
    """Its message may have words of the prompt: whoever sent them is told, and no log."""


class DoesNotFit(LocalLLMError):
    """Not enough memory for the weights or for the context asked for."""

    exit_code = 3
    http_status = 507


class DiskFull(LocalLLMError):
    """The disk has not enough room for what is to be written."""

    exit_code = 3
    http_status = 507


class NotWritable(LocalLLMError):
    """A folder, or the disk that it is on, takes no files: it is read-only, or another's."""

    exit_code = 3
    http_status = 507


class NoSuchDevice(LocalLLMError):
    """The device that was asked for is not in this machine: never a silent fall back."""

    exit_code = 3
    http_status = 400


class ContextOverflow(LocalLLMError):
    """The prompt is longer than the context. Carries both numbers; at_least: it may be longer than told."""

    exit_code = 4
    http_status = 400

    def __init__(self, prompt_tokens: int, context: int, remedy: str, *, at_least: bool = False):
        count = f"at least {prompt_tokens}" if at_least else prompt_tokens
        super().__init__(f"the prompt has {count} tokens and the context holds {context}", remedy)
        self.prompt_tokens = prompt_tokens
        self.context = context


class OutputInvalid(LocalLLMError):
    """The answer is not what a schema or grammar asked for: it was cut by a limit or a stop string, or the mask
    was looser than the schema. The request was in order, so the status is a server's."""

    exit_code = 5


class StoppedByLength(LocalLLMError):
    """The answer was cut by max_tokens or the context, and the caller asked that this be an error."""

    exit_code = 6


class NotReproduced(LocalLLMError):
    """An answer that was computed again from its receipt is another."""

    exit_code = 10


class DamagedModel(LocalLLMError):
    """A file of the model is truncated, contradicts another, or holds NaN or infinite weights."""

    exit_code = 7


class NetworkError(LocalLLMError):
    """The hub cannot be reached, breaks off again and again, or sends something else than it announced."""

    exit_code = 7
    http_status = 502


class AccessDenied(LocalLLMError):
    """The hub wants a login, or that its page of the model is visited and terms are accepted; a server of localllm
    wants a key."""

    exit_code = 8
    http_status = 403


class ModelNotFound(LocalLLMError):
    """No alias, folder or file of that name."""

    exit_code = 8
    http_status = 404


class UnsupportedModel(LocalLLMError):
    """A family, a quantization or a file format that localllm does not run."""

    exit_code = 8
    http_status = 400


class Busy(LocalLLMError):
    """No room for this request now; later there may be. `retry_after`: seconds until it is worth asking again."""

    http_status = 503

    def __init__(self, message: str, remedy: str = "ask again later", retry_after: int = 5):
        super().__init__(message, remedy)
        self.retry_after = retry_after


class LinesFailed(LocalLLMError):
    """A batch is done, and some of its lines have failed."""

    exit_code = 9
