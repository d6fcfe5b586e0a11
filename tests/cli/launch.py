"""Run the program with the fake engine: `python tests/cli/launch.py run FOLDER ...`."""

import runpy
import sys
from pathlib import Path

TESTS = Path(__file__).parent

sys.path.insert(0, str(TESTS.parents[1]))
runpy.run_path(str(TESTS / "fake_engine.py"))["install"]()

from localllm.hardware import device  # noqa: E402

device.explain_unused_gpus = lambda name: ""  # would import torch, which takes most of the time of such a process
runpy.run_module("localllm", run_name="__main__")
