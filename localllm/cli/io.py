"""The contract with pipes and terminals: the prompt comes in as UTF-8, the model's text goes out on stdout
and nothing else does; notes, progress and numbers go to stderr.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any, TextIO

from localllm.errors import UsageError
from localllm.files import expand_path, parse_strict_json
from localllm.formatting import one_line, printable

NO_PROMPT_REMEDY = "give one after the model's name or pipe one in: `echo Hello | localllm run MODEL`"
DIM, RESET = "\x1b[2m", "\x1b[0m"


def is_terminal(stream: TextIO | None) -> bool:
    """A stream that was closed (`<&-`) is None, and no terminal."""
    return stream is not None and stream.isatty()


def supports_redraw(stream: TextIO | None) -> bool:
    """A terminal where what was written can be replaced: no bar moves on a dumb one."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


_sign_of_life = False  # there is one on the terminal's line


def show_sign_of_life(text: str) -> None:
    """One line on a terminal, until anything else is written there: what follows takes a second to import."""
    global _sign_of_life
    if supports_redraw(sys.stderr):
        sys.stderr.write(f"{one_line(text)}\r")
        sys.stderr.flush()
        _sign_of_life = True


def clear_sign_of_life() -> None:
    global _sign_of_life
    if _sign_of_life and sys.stderr is not None:
        _sign_of_life = False
        with suppress(OSError):
            sys.stderr.write("\x1b[K")
            sys.stderr.flush()


def is_interactive() -> bool:
    return is_terminal(sys.stdin) and is_terminal(sys.stdout)


def read_prompt(words: list[str], *, raw: bool) -> str:
    """The prompt: what is piped in as context, then the words as instruction, a blank line between.

    One line end at the end of the piped text is the pipe's, not the prompt's. Raises UsageError where that
    leaves nothing, or where bytes are not UTF-8.
    """
    instruction = " ".join(words)
    try:
        instruction.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            "the prompt is not valid UTF-8", "give it in UTF-8, or pipe it through `iconv`"
        ) from error
    context = "" if is_terminal(sys.stdin) else _decode(read_bytes("-"), "stdin")
    if context.strip() and instruction:
        return context.rstrip("\r\n") + "\n\n" + instruction
    prompt = instruction or context.removesuffix("\n").removesuffix("\r")
    if not prompt or not (raw or prompt.strip()):
        raise UsageError("the prompt is empty", NO_PROMPT_REMEDY)
    return prompt


def read_bytes(file: str) -> bytes:
    """What a user's file holds, or stdin for `-`. Raises UsageError where it is not there."""
    try:
        if file == "-":
            return sys.stdin.buffer.read() if sys.stdin else b""
        return expand_path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error


def read_json(file: str) -> Any:
    """What a user's file holds as JSON, or stdin for `-`. Raises UsageError where it is not there or no JSON."""
    try:
        return parse_strict_json(read_text(file) if file == "-" else read_bytes(file))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{display_name(file)} is not JSON ({error})") from error


def read_text(file: str) -> str:
    """What a user's file holds as UTF-8, or stdin for `-`. Raises UsageError where it is not there or no UTF-8."""
    return _decode(read_bytes(file), display_name(file))


def receipt_path(file: str) -> Path:
    """Where a receipt is to be written. Raises UsageError for a folder."""
    path = expand_path(file)
    if path.is_dir():
        raise UsageError(f"{file} is a folder", "name a file for the receipt")
    return path


def display_name(file: str) -> str:
    """A file that a user named, in words."""
    return "stdin" if file == "-" else file


def read_tools(file: str) -> list[dict[str, Any]]:
    """Functions that a model may call, described as for OpenAI. Raises UsageError for anything else."""
    return check_tools(read_json(file), file)


def check_tools(tools: Any, file: str) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        remedy = 'write [{"type": "function", "function": {"name": ..., "parameters": ...}}]'
        raise UsageError(f"{display_name(file)} holds no list of tools", remedy)
    return tools


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not valid UTF-8 at byte {error.start}", "convert it first: `iconv -f latin1 -t utf-8`"
        ) from error


class StdoutWriter:
    """Writes an answer, or whatever else was asked for, to stdout as it comes."""

    def __init__(self) -> None:
        if sys.stdout is None:
            raise UsageError("stdout is closed", "send the answer to a file or to /dev/null")
        self.terminal = is_terminal(sys.stdout)
        self.last = ""

    def write(self, text: str) -> None:
        if text:
            clear_sign_of_life()
            self.last = text[-1]
            sys.stdout.write(printable(text) if self.terminal else text)
            sys.stdout.flush()

    def finish(self) -> None:
        """A terminal's next line starts at the left; a pipe gets the text alone."""
        if self.terminal and self.last not in ("", "\n"):
            self.write("\n")


class ReasoningWriter:
    """Writes what a model thinks to stderr as it comes: dim in a terminal, or under a heading without colours."""

    def __init__(self) -> None:
        self.terminal = is_terminal(sys.stderr)
        self.dim = supports_redraw(sys.stderr) and not os.environ.get("NO_COLOR")
        self.last = ""

    def write(self, text: str) -> None:
        if text:
            if not self.last and self.terminal and not self.dim:
                self._put("(thinking)\n")
            self.last = text[-1]
            shown = printable(text) if self.terminal else text
            self._put(f"{DIM}{shown}{RESET}" if self.dim else shown)

    def finish(self) -> None:
        """The thoughts end their line; in a terminal, a blank line stands between them and the answer."""
        if self.last:
            self._put("\n" * ((self.last != "\n") + self.terminal))
        self.last = ""

    def _put(self, text: str) -> None:
        clear_sign_of_life()
        if sys.stderr is not None:
            with suppress(OSError):
                sys.stderr.write(text)
                sys.stderr.flush()


def note(text: str) -> None:
    """A remark for the person, on stderr; where that is closed, there is nobody to tell."""
    clear_sign_of_life()
    if sys.stderr is not None:
        with suppress(OSError):
            # Calls of functions and the words of files and templates are remarks, too.
            # With its end in one piece: several threads remark.
            sys.stderr.write(printable(text) + "\n")
            sys.stderr.flush()


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show that something takes a moment, on a terminal only, where it leaves no trace."""
    clear_sign_of_life()
    if not supports_redraw(sys.stderr):
        yield
        return
    from rich.console import Console  # 60 ms that a pipe need not wait for

    with Console(stderr=True).status(text):
        yield


@contextmanager
def silence_stderr(flags: Mapping[str, Any]) -> Iterator[None]:
    """Meanwhile nobody reads stderr, if the flags ask for that. An error is told once it has come out of here."""
    if not flags["quiet"]:
        yield
        return
    if flags.get("verbose"):
        raise UsageError("--quiet and --verbose contradict each other", "leave out one of them")
    with open(os.devnull, "w", encoding="utf-8") as nobody, redirect_stderr(nobody):
        yield


def use_utf8() -> None:
    """The same text on every machine, whatever its locale says."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(encoding="utf-8", errors="backslashreplace" if stream is sys.stderr else "replace")


def discard_stdout() -> None:
    """The reader has gone: keep the interpreter from complaining again when it flushes at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
