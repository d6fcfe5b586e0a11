"""`python -m localllm` and the console script `localllm`."""

import os
import sys

INTERRUPTED, USAGE = 130, 2


def main() -> int:
    """Ctrl-C ends the program without a word also while it is still being read."""
    try:
        from localllm.cli.complete import VARIABLE, answer

        if VARIABLE in os.environ:  # a shell asks
            return answer(os.environ[VARIABLE])
        from localllm.cli.app import main
    except KeyboardInterrupt:
        return INTERRUPTED
    except ValueError as error:  # huggingface_hub reads its variables while it is imported
        print(f"error: a setting is no number: {error}; check the HF_ variables", file=sys.stderr)
        return USAGE
    return main()


if __name__ == "__main__":
    sys.exit(main())
