"""Run the program with the fake engine: `python tests/cli/launch.py run FOLDER ...`."""

import runpy
import sys
from pathlib import Path

TESTS = Path(__file__).parent

sys.path.insert(0, str(TESTS.parents[1]))
runpy.run_path(str(TESTS / "fake_engine.py"))["install"]()
runpy.run_module("localllm", run_name="__main__")
