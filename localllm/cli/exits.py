"""Run a command and turn its error or signal into one line on stderr and an exit code."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from localllm.cli.io import clear_start_line, discard_stdout, note, use_utf8
from localllm.errors import LocalLLMError, UsageError

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # Python itself raises KeyboardInterrupt for SIGINT


class SignalReceived(SystemExit):
    """A signal to end the program, raised in the main thread so that streams are closed, requests to a server are
    aborted and the cursor is shown again."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Raise SignalReceived on the first SIGTERM or SIGHUP; a second one kills. Ignored signals, as under nohup,
    stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in TERMINATION_SIGNALS}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, _raise_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_signal(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise SignalReceived(number)


def die_by_signal(number: int) -> NoReturn:
    """End the process at once by this signal, as shells expect; SIGINT outside a terminal's foreground exits with
    130.

    The interpreter is not shut down: the engine's thread may be inside a kernel, and would abort with a message.
    Output is flushed already.
    """
    if number != signal.SIGINT or _in_foreground():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(128 + number)


def _in_foreground() -> bool:
    """Whether this process is in its terminal's foreground, so that SIGINT came from Ctrl-C: bash and xargs end a
    loop only if the command was killed by the signal."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # no terminal
        return False


DEBUG_HINT = "; this is a bug in localllm, set LOCALLLM_DEBUG=1 for a traceback"


def run_with_exit_code(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code; print its error and return the error's exit code. On a signal, end
    the process by that signal."""
    use_utf8()
    try:
        with signals_as_exceptions():
            code = command()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code or 0
    except KeyboardInterrupt:
        clear_start_line()
        die_by_signal(signal.SIGINT)
    except SignalReceived as received:
        clear_start_line()
        die_by_signal(received.number)
    except LocalLLMError as error:
        note(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:  # as with `| head`
        discard_stdout()
        return 0
    except OSError as error:
        discard_stdout()  # a full disk would fail again when the interpreter flushes
        file = f"{error.filename}: " if error.filename else ""
        reason = error.strerror or str(error)
        note(f"error: {file}{reason[:1].lower()}{reason[1:]}; check free disk space and permissions")
        return LocalLLMError.exit_code
    except Exception as error:
        if os.environ.get("LOCALLLM_DEBUG"):
            import traceback

            traceback.print_exc()
        note(f"error: {type(error).__name__}: {error}{DEBUG_HINT}")
        return LocalLLMError.exit_code


def invalid_hf_setting(error: ValueError) -> UsageError:
    """UsageError for the ValueError that huggingface_hub raises on import for a setting that is not a number."""
    return UsageError(f"a setting is not a number: {error}", "check the HF_ environment variables")
