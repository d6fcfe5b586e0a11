"""`python -m localllm` and the console script `localllm`."""

import os
import sys

INTERRUPTED = 130


def main() -> int:
    """Ctrl-C ends the program without a word also while it is still being read."""
    try:
        from localllm.cli.complete import VARIABLE, answer

        if VARIABLE in os.environ:  # a shell asks
            return answer(os.environ[VARIABLE])
        from localllm.cli.app import main
    except KeyboardInterrupt:
        return INTERRUPTED
    return main()


if __name__ == "__main__":
    sys.exit(main())
