"""`python -m localllm` and the console script `localllm`."""

import sys

from localllm.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
