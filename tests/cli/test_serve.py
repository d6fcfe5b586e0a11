"""What `localllm serve` refuses before it loads a model."""

from types import SimpleNamespace

import pytest

from localllm.cli import simulate_setup
from localllm.cluster import ray_node
from localllm.files import write_token
from localllm.simulate import apart


def test_the_link_to_workers_decides_whether_they_pay(real, monkeypatch, tmp_path):
    setup = SimpleNamespace(asynchronous=False, context=1024, capacity=1000)
    target = SimpleNamespace(setup=setup, device="CPU", cost=SimpleNamespace(source="steps of a test"))
    monkeypatch.setattr(simulate_setup, "target_of", lambda *given, typed: target)

    def compare(target, load, prefill, decode, *, link, on_machines):
        assert (prefill, decode, on_machines) == (2, 1, True)
        return apart.Comparison(target, load, {"ttft": 1.0}, 2, 1, 2.0, link.bandwidth / 1e9, link, on_machines)

    monkeypatch.setattr(apart, "compare_apart", compare)
    write_token(tmp_path / "token")
    words = ("serve", "demo", "--port", "0", "--device", "cpu", "--token-file", str(tmp_path / "token"))
    workers = ("--prefill", "127.0.0.1:1,127.0.0.1:2")  # where nothing listens
    code, _, err = real(*words, *workers)
    assert code == 2 and "3 engines on a machine each would serve 2.00 requests/s" in err
    assert "and with 2 workers for prompts and a link of 1.25 GB/s 1.25" in err.splitlines()[-1]
    for flags in (("--link", "3GB/s"), ("--force",)):
        code, _, err = real(*words, *workers, *flags)
        assert code == 7 and "the worker at 127.0.0.1:1 cannot be reached" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("demo", "--decode", "1"), "--decode needs --prefill"),
        (("demo", "--prefill", "0"), "--prefill is 0"),
        (("demo", "--prefill", "1", "--decode", "0"), "--decode is 0"),
        (("demo", "--prefill", "1", "--replicas", "2"), "give --decode instead"),
        (
            ("demo", "--prefill", "1", "--decode", "2", "--cluster"),
            "processes that compute prompts cannot be on a cluster",
        ),
        (
            ("demo", "--prefill", "1", "--decode", "3"),
            "one engine would serve 2.00 requests/s within ttft=1.00 s, and with --prefill 1 --decode 3 1.50",
        ),
        (
            ("without-ray", "--prefill", "1", "--decode", "2", "--force"),
            "replicas need Ray, which is not installed",
        ),
        (("--prefill", "1"), "--prefill applies only to models that are named"),
        (("demo", "--link", "1GB/s"), "--link needs --prefill"),
        (("demo", "--prefill", "1", "--link", "1GB/s"), "--link is for workers that compute prompts"),
        (("demo", "--prefill", "h:1", "--link", "fast"), "--link is 'fast'"),
        (("demo", "--prefill", "h:1", "--decode", "2"), "workers compute prompts for one engine"),
        (("demo", "--prefill", "h:1", "--replicas", "2"), "workers compute prompts for one engine"),
        (("--prefill", "h:1"), "workers compute prompts for one engine"),
        (("demo", "--prefill", "h:a"), "'h:a' is not the address of a worker"),
        (("demo", "--prefill", "h:1", "--token-file", "/none"), "cannot read the token in /none"),
        (
            ("demo", "--prefill", "1"),
            "one engine would serve 2.00 requests/s within ttft=1.00 s, and with --prefill 1",
        ),
    ],
)
def test_processes_for_prompts_that_would_not_help_are_refused(real, monkeypatch, words, message):
    setup = SimpleNamespace(asynchronous=False, context=1024, capacity=1000)
    target = SimpleNamespace(setup=setup, device="CPU", cost=SimpleNamespace(source="steps of a test"))
    monkeypatch.setattr(simulate_setup, "target_of", lambda *given, typed: target)
    monkeypatch.setattr(ray_node, "find_spec", lambda name: None if "without-ray" in words else name)
    monkeypatch.setattr(
        apart,
        "compare_apart",
        lambda target, load, *engines, **link: apart.Comparison(
            target, load, {"ttft": 1.0}, *engines, 2.0, 1.5, **link
        ),
    )
    code, _, err = real("serve", *words, "--port", "0", "--device", "cpu")
    assert code == 2 and message in err.splitlines()[-1]
