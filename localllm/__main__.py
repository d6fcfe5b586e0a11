"""`python -m localllm` and the console script `localllm`."""

import os
import sys

COMPLETE = "_LOCALLLM_COMPLETE"  # the line up to the cursor, in the environment


def main() -> int:
    """Ctrl-C ends the program without a word also while it is still being read."""
    try:
        if COMPLETE in os.environ:  # a shell asks
            from localllm.cli.complete import answer

            return answer(os.environ[COMPLETE])
        from localllm.cli.door import flags_of, page_of

        if page := page_of(sys.argv[1:]):
            from localllm.cli.exits import exit_code
            from localllm.cli.io import AnswerWriter

            return exit_code(lambda: AnswerWriter().write(page))
        if flags := flags_of(sys.argv[1:]):
            from localllm.cli.asking import ask
            from localllm.cli.exits import exit_code
            from localllm.cli.io import hushed

            def act() -> None:
                with hushed(flags):
                    ask(flags)

            return exit_code(act)
        from localllm.cli.app import main
    except KeyboardInterrupt:
        import signal

        from localllm.cli.signals import die

        die(signal.SIGINT)
    except ValueError as error:
        from localllm.cli.exits import bad_setting

        told = bad_setting(error)
        print(f"error: {told}", file=sys.stderr)
        return told.exit_code
    return main()


if __name__ == "__main__":
    sys.exit(main())
