"""The options and presets of the page: those of the command, with sentences that are true."""

import io
import json
import os
import queue
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx2
import psutil
import pytest

from localllm.cli import simulation_process
from localllm.cli.fast_start import read_command_table
from localllm.cli.simulate_page import CONTROLS, LEFT_OUT, PRESETS, describe_page, given_options, parse_options
from localllm.errors import UsageError

TITLES = {preset.title: preset for preset in PRESETS}


def simulate(localllm: Any, title: str, **changes: Any) -> dict[str, Any]:
    """Run a preset with the command; changes: options by their names, None to leave one out."""
    preset = TITLES[title]
    options = preset.options | {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    words = [
        word
        for flag, value in options.items()
        if value is not None
        for word in ([flag] if value is True else [flag, str(value)])
    ]
    code, out, err = localllm("simulate", preset.model, *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_every_option_of_the_command_is_on_the_page() -> None:
    described = {option["flag"]: option for option in describe_page()["options"]}
    table = read_command_table()["commands"]["simulate"]["options"]
    assert described.keys() == table.keys() - LEFT_OUT - {"--help"}
    assert CONTROLS.keys() <= described.keys()
    for flag, option in described.items():
        assert option["help"] == table[flag]["help"]
        assert (option["type"] == "switch") == (table[flag]["type"] == "flag")
        assert (option["type"] == "number") == (table[flag]["type"] in ("int", "float"))
        named = {other for other, _ in option["needs"]} | set(option["excludes"])
        assert named <= described.keys()


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.title)
def test_presets_are_command_lines(preset: Any) -> None:
    flags, words = parse_options(preset.model, preset.options)
    assert words[0] == flags["model"] == preset.model
    assert given_options(flags) == preset.options
    assert preset.see.endswith(".") and len(preset.see) < 200


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("demo", {"--trace": "/etc/passwd"}, "--trace is not an option of the page"),
        ("demo", {"--nothing": 1}, "--nothing is not an option of the page"),
        ("demo", {"--rate": "fast"}, "invalid value for '--rate'"),
        ("demo", {"--no-prefix-cache": "yes"}, "--no-prefix-cache is 'yes'"),
        ("--help", {}, "'--help' is not a name of a model"),
    ],
)
def test_refused_options(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_options(model, options)


def test_a_value_is_never_a_flag() -> None:
    flags, _ = parse_options("demo", {"--slo": "--plot=x.png"})
    assert flags["slo"] == "--plot=x.png" and flags["plot"] is None


def test_static_and_continuous_batching(localllm: Any) -> None:
    """The queue of static batching only grows, and with the same requests there is none otherwise."""
    static, continuous = (simulate(localllm, f"{name}") for name in list(TITLES)[:2])
    assert static["queue_s"]["p50"] > 60 and static["most_waiting"] > 500
    assert continuous["queue_s"]["p95"] < 0.1 and continuous["requests"] == static["requests"]
    without = {name: value for name, value in PRESETS[0].options.items() if "batch" not in name}
    assert without == PRESETS[1].options


def test_prefix_caching(localllm: Any) -> None:
    cached, computed = (simulate(localllm, "Prefix caching", no_prefix_cache=off) for off in (None, True))
    assert cached["cached_tokens"] > 0.75 * cached["prompt_tokens"]
    assert computed["ttft_s"]["p50"] > 3 * cached["ttft_s"]["p50"]


def test_speculation(localllm: Any) -> None:
    drafting, plain = (simulate(localllm, "Speculation", drafts=drafts) for drafts in (4, None))
    assert drafting["tpot_s"]["p50"] == pytest.approx(plain["tpot_s"]["p50"] / 3, rel=0.15)


def test_more_gpus(localllm: Any) -> None:
    half, whole = (simulate(localllm, "More GPUs", replicas=count) for count in ("2", None))
    assert whole["ttft_s"]["p50"] > 10 * half["ttft_s"]["p50"]


def test_breaking_point(localllm: Any) -> None:
    found = simulate(localllm, "Breaking point")
    assert found["met"] < 0.5 * found["requests"] and 10 < found["capacity"]["amount"] < 60


def test_70b_wall(localllm: Any) -> None:
    preset = TITLES["The 70B wall"]
    code, _, err = localllm("simulate", preset.model, "--device", "h100", "--rate", "2")
    assert code == 3 and "141 GB" in err
    int8, int4, fp8 = (
        simulate(localllm, preset.title, **changes) for changes in ({}, {"quant": "int4"}, {"kv_dtype": "fp8"})
    )
    assert int8["queue_s"]["p95"] > 3 * int4["queue_s"]["p95"]
    assert int8["queue_s"]["p95"] > 3 * fp8["queue_s"]["p95"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "no model is named"),
        (("demo", "--rate", "1", "--port", "80"), "--port needs --ui"),
        (("demo", "--ui", "--trace", "x.csv"), "--trace has no effect with --ui"),
        (("demo", "--ui", "--json"), "--json has no effect with --ui"),
    ],
)
def test_refused_flags(localllm: Any, flags: tuple[str, ...], message: str) -> None:
    code, out, err = localllm("simulate", *flags)
    assert (code, out) == (2, "") and message in err


def test_ui_prints_its_address_and_ends_with_ctrl_c(tmp_path: Any) -> None:
    command = [sys.executable, "-m", "localllm", "simulate", "demo", "--ui", "--rate", "3", "--no-prefix-cache"]
    environment = os.environ | {"DISPLAY": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, process_group=0) as process:
        assert process.stdout
        url = process.stdout.readline().strip()
        base, _, fragment = url.partition("#")
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/simulate", base)
        assert fragment == "model=demo&--rate=3.0&--no-prefix-cache=True"
        assert httpx2.get(base).status_code == 200
        origin = base.removesuffix("/simulate")
        assert "demo" in httpx2.get(f"{origin}/simulate/options", timeout=60).json()["models"]
        assert httpx2.get(f"{origin}/ui").status_code == httpx2.get(f"{origin}/v1/models").status_code == 404
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


# The process that runs simulations, as functions of this one


def request(count: int, **more: str) -> dict[str, Any]:
    options = {"--device": "h100", "--rate": 5, "--requests": count} | {f"--{name}": more[name] for name in more}
    return {"model": "demo", "source": "demo", "options": options}


def test_the_process_answers_in_order_and_stops_what_is_cancelled(
    localllm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, requests, niceness = io.StringIO(), queue.SimpleQueue[Any](), Mock()

    def answered() -> list[dict[str, Any]]:
        return [json.loads(line) for line in out.getvalue().splitlines(keepends=True) if line.endswith("\n")]

    def stdin() -> Iterator[str]:
        yield json.dumps({"describe": True})
        yield json.dumps({"run": request(8, slo="ttft=1us")})
        wait_until(lambda: sum("end" in each for each in answered()) == 2)
        begin = len(answered())
        yield json.dumps({"run": request(20_000)})
        wait_until(lambda: len(answered()) > begin + 3)
        yield json.dumps({"cancel": True})
        wait_until(lambda: "end" in answered()[-1])
        yield json.dumps({"run": request(1)})
        wait_until(lambda: sum("end" in each for each in answered()) == 4)

    system = {
        "nice": niceness,
        "dup": lambda number: number,
        "fdopen": lambda number, mode, encoding: out,
        "_exit": lambda code: requests.put({"exit": code}),  # which is no request, so that `main` ends here
    }
    monkeypatch.setattr(simulation_process, "os", SimpleNamespace(**system))
    monkeypatch.setattr(simulation_process, "queue", SimpleNamespace(SimpleQueue=lambda: requests))
    monkeypatch.setattr(simulation_process, "limit_memory", limit := Mock())
    monkeypatch.setattr(sys, "stdin", stdin())
    with pytest.raises(KeyError, match="run"):
        simulation_process.main()
    assert capsys.readouterr().out == "" and niceness.call_args.args[0] > 0 and limit.call_count == 1
    ends = [index for index, each in enumerate(answered()) if "end" in each]
    described, first, cancelled, last = (answered()[index] for index in ends)
    assert described == json.loads(json.dumps(describe_page())) | {"end": True}
    assert cancelled == {"cancelled": True, "end": True}
    assert last["report"]["requests"] == 1

    words = ("--device", "h100", "--rate", "5", "--requests", "8", "--slo", "ttft=1us")
    _, text, _ = localllm("simulate", "demo", *words)
    _, report, _ = localllm("simulate", "demo", *words, "--json")
    answer = first["answer"].split()
    assert first["text"] == text.rstrip("\n") and answer == text.split()[-len(answer) :]
    assert first["report"] | {"wall_s": 0} == json.loads(report) | {"wall_s": 0}
    command, *frames = [each for each in answered()[ends[0] + 1 : ends[1]] if "status" not in each]
    assert command["command"] == f"localllm simulate demo {' '.join(words)}"
    assert (command["device"], command["requests"], command["limits"]) == ("H100 SXM", 8, {"ttft": 1e-6})
    assert frames[-1]["done"] == 8


def wait_until(condition: Any) -> None:
    """Wait for at most 20 s, as the thread that waits is not the one that asserts."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (UsageError("--rate is 0", "give more"), '"UsageError", "message": "--rate is 0", "remedy": "give more"'),
        (MemoryError(), "the simulation takes more than 4 GiB"),
        (ZeroDivisionError("by zero"), "see the server's log for the traceback"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_end_the_answer_and_not_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, answer: Any
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(simulation_process, "simulate", Mock(side_effect=error))
    simulation_process.run({}, sent.append, threading.Event())
    assert [each.pop("end") for each in sent] == [True]
    assert answer in json.dumps(sent)
    assert ("ZeroDivisionError: by zero" in capsys.readouterr().err) == isinstance(error, ZeroDivisionError)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux alone")
@pytest.mark.parametrize("hard", [resource.RLIM_INFINITY, 2**20])
def test_memory_is_limited_beyond_what_is_mapped(monkeypatch: pytest.MonkeyPatch, hard: int) -> None:
    limits = Mock(RLIM_INFINITY=resource.RLIM_INFINITY, getpagesize=resource.getpagesize)
    limits.getrlimit.return_value = (hard, hard)
    monkeypatch.setattr(simulation_process, "resource", limits)
    simulation_process.limit_memory()
    if hard != resource.RLIM_INFINITY:  # there is a lower limit, which stays
        assert not limits.setrlimit.called
        return
    [(_, (soft, kept))] = [call.args for call in limits.setrlimit.call_args_list]
    assert kept == hard and soft == pytest.approx(psutil.Process().memory_info().vms + 4 * 2**30, rel=0.05)
