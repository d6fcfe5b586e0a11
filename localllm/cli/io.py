"""Input and output of commands: prompts are read as UTF-8, stdout gets only results, and notes, progress and
measurements go to stderr.
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

DIM, RESET = "\x1b[2m", "\x1b[0m"


FLAG_NAMES = {"as_json": "--json", "as_csv": "--csv", "as_markdown": "--markdown", "stop_ids": "--stop-id"}


def flag_name(field: str) -> str:
    """Flag of a command's parameter as the user types it."""
    return FLAG_NAMES.get(field, "--" + field.replace("_", "-"))


def is_terminal(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal; a closed one (`<&-`) is None."""
    return stream is not None and stream.isatty()


def supports_redraw(stream: TextIO | None) -> bool:
    """Whether the stream is a terminal that can erase and redraw text."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


_start_line_visible = False


def show_start_line(text: str) -> None:
    """Show one line on a terminal until something else is written there, while imports take up to a second."""
    global _start_line_visible
    if supports_redraw(sys.stderr):
        sys.stderr.write(f"{one_line(text)}\r")
        sys.stderr.flush()
        _start_line_visible = True


def clear_start_line() -> None:
    global _start_line_visible
    if _start_line_visible and sys.stderr is not None:
        _start_line_visible = False
        with suppress(OSError):
            sys.stderr.write("\x1b[K")
            sys.stderr.flush()


def is_interactive() -> bool:
    return is_terminal(sys.stdin) and is_terminal(sys.stdout)


def read_prompt(words: list[str], *, raw: bool, command: str) -> str:
    """Prompt of a command: the text piped to stdin, a blank line, and the words of the command line. command: such
    as `run`, named by an error

    The last line end of piped text is dropped. Raises UsageError if the prompt is empty or not UTF-8.
    """
    instruction = " ".join(words)
    try:
        instruction.encode()
    except UnicodeEncodeError as error:
        raise UsageError("the prompt is not valid UTF-8", "convert it first, for example with `iconv`") from error
    context = "" if is_terminal(sys.stdin) else _decode(read_bytes("-"), "stdin")
    if context.strip() and instruction:
        return context.rstrip("\r\n") + "\n\n" + instruction
    prompt = instruction or context.removesuffix("\n").removesuffix("\r")
    if not prompt or not (raw or prompt.strip()):
        pipe = f"`echo Hello | localllm {command} MODEL`"
        raise UsageError("the prompt is empty", f"give one after the name of the model, or pipe one in: {pipe}")
    return prompt


def read_bytes(file: str) -> bytes:
    """Content of a file, or of stdin for `-`. Raises UsageError if it cannot be read."""
    try:
        if file == "-":
            return sys.stdin.buffer.read() if sys.stdin else b""
        return expand_path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error


def read_json(file: str) -> Any:
    """JSON content of a file, or of stdin for `-`. Raises UsageError if it cannot be read or is not JSON."""
    try:
        return parse_strict_json(read_text(file) if file == "-" else read_bytes(file))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{display_name(file)} is not JSON ({error})") from error


def read_text(file: str) -> str:
    """UTF-8 content of a file, or of stdin for `-`. Raises UsageError if it cannot be read or is not UTF-8."""
    return _decode(read_bytes(file), display_name(file))


def receipt_path(file: str) -> Path:
    """Path of the receipt to write. Raises UsageError for a folder, before the answer is computed."""
    path = expand_path(file)
    if path.is_dir():
        raise UsageError(f"{file} is a folder", "name a file for --receipt")
    return path


def display_name(file: str) -> str:
    """Name of a file argument in messages."""
    return "stdin" if file == "-" else file


def read_tools(file: str) -> list[dict[str, Any]]:
    """Tools in a JSON file, in OpenAI's format. Raises UsageError for anything else."""
    return check_tools(read_json(file), file)


def check_tools(tools: Any, file: str) -> list[dict[str, Any]]:
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        remedy = 'write [{"type": "function", "function": {"name": ..., "parameters": ...}}]'
        raise UsageError(f"{display_name(file)} is not a list of tools", remedy)
    return tools


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name} is not valid UTF-8 at byte {error.start}", "convert it first: `iconv -f latin1 -t utf-8`"
        ) from error


class StdoutWriter:
    """Writes and flushes text to stdout; on a terminal with control characters made visible. Raises UsageError if
    stdout is closed."""

    def __init__(self) -> None:
        if sys.stdout is None:
            raise UsageError("stdout is closed", "send the answer to a file or to /dev/null")
        self.terminal = is_terminal(sys.stdout)
        self.last = ""
        self.is_flushed = True

    def write(self, text: str, *, flush: bool = True) -> None:
        """flush: False if more text is there already, which will be flushed with this one."""
        if text:
            clear_start_line()
            self.last, self.is_flushed = text[-1], False
            sys.stdout.write(printable(text) if self.terminal else text)
        if flush:
            self.flush()

    def flush(self) -> None:
        if not self.is_flushed:
            self.is_flushed = True
            sys.stdout.flush()

    def finish(self) -> None:
        """End the last line on a terminal; a pipe gets exactly the text."""
        if self.terminal and self.last not in ("", "\n"):
            self.write("\n")
        self.flush()


class ReasoningWriter:
    """Writes reasoning to stderr as it streams: dim on a terminal, or under a heading if colors are off."""

    def __init__(self) -> None:
        self.terminal = is_terminal(sys.stderr)
        self.dim = supports_redraw(sys.stderr) and not os.environ.get("NO_COLOR")
        self.last = ""

    def write(self, text: str) -> None:
        if text:
            if not self.last and self.terminal and not self.dim:
                self._put("(thinking)\n")
            self.last = text[-1]
            text = printable(text) if self.terminal else text
            self._put(f"{DIM}{text}{RESET}" if self.dim else text)

    def finish(self) -> None:
        """End the last line; on a terminal, add a blank line before the answer."""
        if self.last:
            self._put("\n" * ((self.last != "\n") + self.terminal))
        self.last = ""

    def _put(self, text: str) -> None:
        clear_start_line()
        if sys.stderr is not None:
            with suppress(OSError):
                sys.stderr.write(text)
                sys.stderr.flush()


def note(text: str) -> None:
    """Print a line on stderr, unless it is closed. Control characters are made visible, since the text may come
    from a model, a file or a template."""
    clear_start_line()
    if sys.stderr is not None:
        with suppress(OSError):
            sys.stderr.write(printable(text) + "\n")  # one call, because several threads print notes
            sys.stderr.flush()


@contextmanager
def status(text: str) -> Iterator[None]:
    """Show a spinner with this text on a terminal, and erase it at the end."""
    clear_start_line()
    if not supports_redraw(sys.stderr):
        yield
        return
    from rich.console import Console  # takes 60 ms to import

    with Console(stderr=True).status(text):
        yield


@contextmanager
def silence_stderr(flags: Mapping[str, Any]) -> Iterator[None]:
    """Discard what is written to stderr if `--quiet` is set; errors are printed after this context ends. Raises
    UsageError if `--verbose` is set as well."""
    if not flags["quiet"]:
        yield
        return
    if flags.get("verbose"):
        raise UsageError("--quiet and --verbose contradict each other", "leave one of them out")
    with open(os.devnull, "w", encoding="utf-8") as devnull, redirect_stderr(devnull):
        yield


def use_utf8() -> None:
    """Make stdout and stderr write UTF-8 in every locale."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(encoding="utf-8", errors="backslashreplace" if stream is sys.stderr else "replace")


def discard_stdout() -> None:
    """Send stdout to /dev/null, so that the interpreter's flush at exit does not fail again."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
