"""What `localllm serve` refuses before it loads a model."""

from types import SimpleNamespace

import pytest

from localllm.cli import simulate_setup
from localllm.cluster import place
from localllm.simulate import apart


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("demo", "--decode", "1"), "--decode needs --prefill"),
        (("demo", "--prefill", "0"), "--prefill is 0"),
        (("demo", "--prefill", "1", "--decode", "0"), "--decode is 0"),
        (("demo", "--prefill", "1", "--replicas", "2"), "give --decode instead"),
        (("demo", "--prefill", "1", "--decode", "2", "--cluster"), "processes for prompts are on one machine"),
        (
            ("demo", "--prefill", "1", "--decode", "3"),
            "one engine would serve 2.00 requests/s within ttft=1.00 s, and with --prefill 1 --decode 3 1.50",
        ),
        (
            ("without-ray", "--prefill", "1", "--decode", "2", "--force"),
            "replicas need Ray, which is not installed",
        ),
        (("--prefill", "1"), "--prefill is for the models that are named"),
        (
            ("demo", "--prefill", "1"),
            "one engine would serve 2.00 requests/s within ttft=1.00 s, and with --prefill 1",
        ),
    ],
)
def test_processes_for_prompts_that_would_not_help_are_refused(real, monkeypatch, words, message):
    setup = SimpleNamespace(asynchronous=False, context=1024, capacity=1000)
    target = SimpleNamespace(setup=setup, device="CPU", cost=SimpleNamespace(source="steps of a test"))
    monkeypatch.setattr(simulate_setup, "target_of", lambda *given: target)
    monkeypatch.setattr(place, "find_spec", lambda name: None if "without-ray" in words else name)
    monkeypatch.setattr(
        apart,
        "compare_apart",
        lambda target, load, *engines: apart.Comparison(target, load, {"ttft": 1.0}, *engines, 2.0, 1.5),
    )
    code, _, err = real("serve", *words, "--port", "0", "--device", "cpu")
    assert code == 2 and message in err.splitlines()[-1]
