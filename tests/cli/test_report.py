from localllm.cli.report import load_block, table
from tests.cli.fake_engine import FakeLLM


def test_columns_are_as_wide_as_their_widest_cell():
    assert table([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"


def test_why_a_gpus_steps_are_not_captured_is_told():
    told = load_block("cuda:0", FakeLLM.memory, {"weights": 1.0}, None, "one of its kernels goes step by step")
    assert told.splitlines()[-1] == "graphs         no: one of its kernels goes step by step"
    assert "graphs" not in load_block("cuda:0", FakeLLM.memory, {"weights": 1.0}, None)
