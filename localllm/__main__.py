"""`python -m localllm` and the console script `localllm`."""

import os
import sys

COMPLETION_VARIABLE = "_LOCALLLM_COMPLETE"  # the line up to the cursor, in the environment


def main() -> int:
    """Run the command line. Ctrl-C ends the program without a traceback, even while modules are imported."""
    try:
        if COMPLETION_VARIABLE in os.environ:  # set by the shell
            from localllm.cli.complete import print_completions

            return print_completions(os.environ[COMPLETION_VARIABLE])
        from localllm.cli.fast_start import help_page, parse_run_flags

        if page := help_page(sys.argv[1:]):
            from localllm.cli.exits import run_with_exit_code
            from localllm.cli.io import StdoutWriter

            return run_with_exit_code(lambda: StdoutWriter().write(page))
        if flags := parse_run_flags(sys.argv[1:]):
            from localllm.cli.io import show_sign_of_life, silence_stderr

            if not flags["quiet"]:
                show_sign_of_life(f"starting {flags['model']}")
            from localllm.cli.execute_run import execute_run
            from localllm.cli.exits import run_with_exit_code

            def act() -> None:
                with silence_stderr(flags):
                    execute_run(flags)

            return run_with_exit_code(act)
        from localllm.cli.app import main
    except KeyboardInterrupt:
        import signal

        from localllm.cli.exits import die_by_signal

        die_by_signal(signal.SIGINT)
    except ValueError as error:
        from localllm.cli.exits import invalid_hf_setting

        usage_error = invalid_hf_setting(error)
        print(f"error: {usage_error}", file=sys.stderr)
        return usage_error.exit_code
    return main()


if __name__ == "__main__":
    sys.exit(main())
