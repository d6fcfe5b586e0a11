"""What becomes of the errors of a command: one line on stderr, and the exit code."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from localllm.cli.io import clear_sign_of_life, discard_stdout, note, use_utf8
from localllm.errors import LocalLLMError, UsageError

# What ends the program from outside: it puts away what it holds, then dies of the signal, as shells expect.
#
# Shells show 128 plus the number: 130 for Ctrl-C, 143 for SIGTERM, 129 for a terminal that is gone. Without a
# terminal SIGINT is exit code 130 for whatever else started the program, too.

TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # Python itself raises KeyboardInterrupt for SIGINT


class SignalReceived(SystemExit):
    """Raised in the main thread, so that streams are closed, the cursor is shown and the server is told."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Ended meanwhile; a second one kills. What is ignored, as by nohup, stays so."""
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
    """Of the signal, at once; of SIGINT away from a terminal's foreground with exit code 130. The engine's thread
    may be inside a kernel, and an interpreter that ends around it aborts with a message. Everything that was said
    has been flushed."""
    if number != signal.SIGINT or _in_foreground():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(128 + number)


def _in_foreground() -> bool:
    """Of a terminal, where Ctrl-C was typed: bash and xargs end a loop only if its command died of the signal."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # none, or it is gone
        return False


DEBUG_HINT = "; this is a fault of localllm, LOCALLLM_DEBUG=1 shows where"


def run_with_exit_code(command: Callable[[], int | None]) -> int:
    """Run a command and return its exit code, or that of its error. On a signal, die of that signal."""
    use_utf8()
    try:
        with signals_as_exceptions():
            code = command()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code or 0
    except KeyboardInterrupt:
        clear_sign_of_life()
        die_by_signal(signal.SIGINT)
    except SignalReceived as ended:
        clear_sign_of_life()
        die_by_signal(ended.number)
    except LocalLLMError as error:
        note(f"error: {error}")
        return error.exit_code
    except BrokenPipeError:  # `| head`: the reader has what it wanted
        discard_stdout()
        return 0
    except OSError as error:
        discard_stdout()  # a full disk, say, would fail again when the interpreter flushes
        where = f" ({error.filename})" if error.filename else ""
        note(f"error: the system says: {error.strerror or error}{where}; check the disk and the rights")
        return LocalLLMError.exit_code
    except Exception as error:
        if os.environ.get("LOCALLLM_DEBUG"):
            import traceback

            traceback.print_exc()
        note(f"error: {type(error).__name__}: {error}{DEBUG_HINT}")
        return LocalLLMError.exit_code


def invalid_hf_setting(error: ValueError) -> UsageError:
    """huggingface_hub reads its variables while it is imported, and raises this."""
    return UsageError(f"a setting is no number: {error}", "check the HF_ variables")
