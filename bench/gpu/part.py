"""One part in its process: a line of JSON on stdout for each row. What libraries print goes to stderr."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import cast

from bench.gpu.setting import Part, Row, Setting, missing_wheels
from localllm.hardware.device import device_context, resolve_device


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("part")
    options.add_argument("device")
    options.add_argument("--tiny", action="store_true")
    chosen = options.parse_args()
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    for row in rows_of(chosen.part, Setting(resolve_device(chosen.device), chosen.tiny)):
        print(json.dumps(row), file=rows, flush=True)


def rows_of(name: str, setting: Setting) -> Iterator[Row]:
    """Measure a part on its device, which is the current one: of its events, its streams and its kernels.

    A part whose wheels are not here says so."""
    if missing := missing_wheels(name):
        yield {"left out": f"needs wheels that are not here: pip install {missing}"}
        return
    part = cast(Part, import_module(f"bench.gpu.{name}"))
    with device_context(setting.device):
        yield from part.measure(setting)


if __name__ == "__main__":
    main()
