from localllm.cli.answer import format_metrics
from localllm.cli.loading import format_load
from localllm.formatting import format_table
from localllm.metrics import Stopwatch
from tests.cli.fake_engine import FakeLLM


def test_columns_are_as_wide_as_their_widest_cell():
    assert format_table([("a", "bb"), ("ccc", "d")]) == "a    bb\nccc  d"


def test_the_reason_against_cuda_graphs_is_shown():
    told = format_load("cuda:0", FakeLLM.memory, {"weights": 1.0}, None, "one of its kernels goes step by step")
    assert told.splitlines()[-1] == "graphs         no: one of its kernels goes step by step"
    assert "graphs" not in format_load("cuda:0", FakeLLM.memory, {"weights": 1.0}, None)


def test_drafts_are_reported_with_the_steps_saved():
    watch = Stopwatch(0.0)
    watch.mark_scheduled()
    for drafted, accepted in ((0, False), (3, False), (0, True), (0, True)):
        watch.record_token(drafted, accepted=accepted)
    lines = format_metrics(watch.finish(5, 0, 0), seed=1).splitlines()
    assert [line.split(None, 1)[1] for line in lines if line.startswith(("drafts", "tokens/step"))] == [
        "3 tokens (2 accepted)",
        "2.00",
    ]
