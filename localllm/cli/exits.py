"""What becomes of the errors of a command: one line on stderr, and the exit code."""

import os
import signal
import sys
from collections.abc import Callable

from localllm.cli.io import clear_sign_of_life, discard_stdout, note, use_utf8
from localllm.cli.signals import SignalReceived, die_by_signal, signals_as_exceptions
from localllm.errors import LocalLLMError, UsageError

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
