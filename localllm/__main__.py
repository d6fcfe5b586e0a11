"""`python -m localllm` and the console script `localllm`."""

import os
import sys
from typing import Any

COMPLETION_VARIABLE = "_LOCALLLM_COMPLETE"  # set by shells to the command line up to the cursor


def main() -> int:
    """Run the program and return its exit code. Ctrl-C ends it silently even during imports."""
    try:
        return _dispatch(sys.argv[1:])
    except KeyboardInterrupt:
        import signal

        from localllm.cli.exits import die_by_signal

        die_by_signal(signal.SIGINT)
    except ValueError as value_error:
        from localllm.cli.exits import invalid_hf_setting

        error = invalid_hf_setting(value_error)
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _dispatch(arguments: list[str]) -> int:
    """Answer Tab, `--help` and plain lines of some commands without parsing with Typer; run all others with it."""
    if COMPLETION_VARIABLE in os.environ:
        from localllm.cli.complete import print_completions

        return print_completions(os.environ[COMPLETION_VARIABLE])
    from localllm.cli.fast_start import help_page, parse_run_flags, parse_short_command

    if page := help_page(arguments):
        from localllm.cli.exits import run_with_exit_code
        from localllm.cli.io import StdoutWriter

        return run_with_exit_code(lambda: StdoutWriter().write(page))
    if flags := parse_run_flags(arguments):
        return _run(flags)
    if (flags := parse_short_command(arguments)) is not None:
        return _run_short_command(arguments[0], flags)
    from localllm.cli.app import main

    return main(arguments)


def _run(flags: dict[str, Any]) -> int:
    from localllm.cli.io import show_start_line, silence_stderr

    if not flags["quiet"]:
        show_start_line(f"starting {flags['model']}")
    from localllm.cli.execute_run import execute_run
    from localllm.cli.exits import run_with_exit_code

    def execute() -> None:
        with silence_stderr(flags):
            execute_run(flags)

    return run_with_exit_code(execute)


def _run_short_command(name: str, flags: dict[str, Any]) -> int:
    from localllm.cli.exits import run_with_exit_code
    from localllm.cli.fast_start import find_command
    from localllm.cli.io import silence_stderr

    def execute() -> None:
        command = find_command(name)
        with silence_stderr(flags):
            command(**{field: value for field, value in flags.items() if field != "quiet"})

    return run_with_exit_code(execute)


if __name__ == "__main__":
    sys.exit(main())
