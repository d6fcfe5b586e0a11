"""One part in its process: a line of JSON on stdout for each row. What libraries print goes to stderr."""

import argparse
import json
import os
import sys
from importlib import import_module
from typing import cast

from bench.gpu.setting import Part, Setting
from localllm.hardware.device import resolve_device


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("part")
    options.add_argument("device")
    options.add_argument("--tiny", action="store_true")
    chosen = options.parse_args()
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    part = cast(Part, import_module(f"bench.gpu.{chosen.part}"))
    for row in part.measure(Setting(resolve_device(chosen.device), chosen.tiny)):
        print(json.dumps(row), file=rows, flush=True)


if __name__ == "__main__":
    main()
