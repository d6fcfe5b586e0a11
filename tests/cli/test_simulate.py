"""`localllm simulate` as a user types it: text in 80 columns, JSON, and refused flags."""

import json
import re

import pytest
from typer.main import get_command

from localllm.checkpoint.header import read_header
from localllm.cli.app import app
from localllm.cli.io import flag_name
from localllm.cli.simulate_setup import NOT_REPLAYED
from localllm.hardware.prices import find_price
from localllm.hub.resolve import resolve_model
from localllm.plan.expected import step_setup
from localllm.plan.fit import LoadOptions
from localllm.settings import Settings
from tests.benchmark.load.scripted_server import ScriptedServer, completions
from tests.plan.made_up_steps import record_steps
from tests.plan.published import LLAMA_8B, write_sparse


@pytest.fixture
def llama(tmp_path):
    """A folder with the files of Llama 3.1 8B that a plan reads, and a sparse file of the model's size."""
    folder = write_sparse(tmp_path / "llama-8b", LLAMA_8B)
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def simulate(localllm, *arguments: str) -> dict:
    code, out, err = localllm("simulate", *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_report(localllm, llama):
    flags = ("--rate", "5", "--requests", "50", "--slo", "ttft=500ms,tpot=20ms,e2e=5s")
    code, out, err = localllm("simulate", llama, "--device", "h100", *flags)
    assert (code, err) == (0, "")
    assert "H100 SXM serves" in out and "for 95% of the requests" in " ".join(out.split())
    assert all(len(line) <= 80 for line in out.splitlines())
    text = " ".join(out.split())
    assert "roofline of the H100 SXM at 70% of its published bandwidth and 55% of its arithmetic rate" in text
    assert "assumed, no step was measured" in text
    assert "50 requests in" in text
    for label in ("queue", "TTFT", "TPOT", "ITL", "E2E", "throughput", "utilisation", "cache hits", "preemptions"):
        assert f"\n{label} " in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--trace azure.csv --speed 2", ["2 requests of a trace (Azure LLM inference), 2 times as fast"]),
        ("--batching static --batch-size 4", ["static batching of 4, up to"]),
        ("--batching dynamic --batch-size 4 --max-wait 1m", ["dynamic batching of 4, after at most 60 s"]),
        ("--order shortest --no-admission", ["shortest prompt first; no reservation for answers"]),
        (
            "--prefill 1 --decode 2 --link 25GB/s --prompt 1000",
            ["1 for prompts and 2 for answers; 131 kB per token over 25 GB/s", "10 of 131 MB on average"],
        ),
        ("--replicas 2 --kill 1@1s --start-up 2s", ["started within 2 s; replica 1 fails after 1 s"]),
        ("--drafts 1 --acceptance 1", ["1 draft tokens, accepted with 100%", ", 100% accepted"]),
        ("--efficiency 0.5,0.4", ["at 50% of its published bandwidth and 40% of its arithmetic rate"]),
        (
            "--host-cache 64GB,20GB/s --disk-cache 1TB,2GB/s",
            ["64.0 GB of main memory over 20 GB/s; 1.00 TB of disk at 2 GB/s", "0.0% from main memory and 0.0%"],
        ),
        (
            "--slo ttft=1us --attainment 0.9",
            ["no such load within TTFT <= 0.001 ms for 90%", "no setting that was tried serves 5 requests/s"],
        ),
    ],
)
def test_what_the_report_says_of_flags(localllm, llama, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    rows = "2023-11-16 18:17:03.9799600,300,20\n2023-11-16 18:17:04.0319600,100,30\n"
    (tmp_path / "azure.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    load = () if "--trace" in flags else ("--rate", "5", "--requests", "10")
    code, out, err = localllm("simulate", llama, "--device", "h100", *load, *flags.split())
    assert (code, err) == (0, "") and all(len(line) <= 80 for line in out.splitlines())
    text = " ".join(out.split())
    assert [each for each in words if each not in text] == []


def test_decode_step_of_roofline(localllm, llama):
    """A single user's TPOT is the time to read weights and context at 70% of the bandwidth, and the overhead."""
    found = simulate(localllm, llama, "--device", "h100", "--users", "1", "--requests", "3", "--prompt", "1000")
    weights, layers = 2 * (8_030_261_248 - 128256 * 4096), 32
    context = 131_072 * 1064  # half of an answer of 128 tokens behind the prompt
    expected = (weights + context) / (0.7 * 3.35e12) + 5e-6 * layers
    assert found["tpot_s"]["p50"] == pytest.approx(expected, rel=0.01)
    assert found["busy"] == pytest.approx(1, abs=0.01)
    assert found["bandwidth_share"] == pytest.approx(0.69, abs=0.04)


def test_slow_answers_do_not_slow_down_a_batch(localllm):
    """The overheads in an answer's rate are those of a step, and not of every byte that 128 sequences read."""
    settings = Settings.from_environment()
    options, home = LoadOptions(None, 1, None, "auto", "auto"), settings.home
    setup, _ = step_setup(read_header(resolve_model("demo").path), options, "cpu", settings, name="demo")
    slow = {
        "model": "demo",
        "device": setup.device,
        "dtype": setup.dtype,
        "form": "INT8",
        "threads": setup.threads,
    }
    slow |= {
        "threads": setup.threads,
        "context": 110,
        "bytes_per_token": 6.3e6,
        "tokens_per_s": 20.0,
        "flops_per_s": 2e10,
    }
    home.mkdir(parents=True, exist_ok=True)
    (home / "runs.jsonl").write_text(json.dumps(slow) + "\n")
    flags = ("--device", "cpu", "--users", "128", "--requests", "200")
    code, out, _ = localllm("simulate", "demo", *flags, "--json")  # a busy machine is noted on stderr
    assert code == 0
    found = json.loads(out)
    assert "matrix products" in found["step_times"]
    assert found["tpot_s"]["p50"] < 0.2


def test_capacity(localllm, llama):
    """The highest load is within the objectives, and a load a tenth above is not."""
    flags = ("--device", "h100", "--requests", "300", "--slo", "ttft=500ms,tpot=20ms")
    found = simulate(localllm, llama, "--rate", "3", *flags)
    rate = found["capacity"]["amount"]
    at, above = (simulate(localllm, llama, "--rate", str(r), *flags) for r in (rate, 1.1 * rate))
    assert at["met"] / at["requests"] >= 0.95 > above["met"] / above["requests"]
    users = simulate(localllm, llama, "--users", "10", "--think", "20s", *flags)["capacity"]
    assert users["unit"] == "users" and users["amount"] == int(users["amount"]) > 10


@pytest.mark.parametrize("load", [("--rate", "5"), ("--users", "5")])
def test_a_load_that_is_too_short_shows_a_lower_bound(localllm, load: tuple[str, str]) -> None:
    """All of its requests come at once, and meet the objective."""
    flags = ("--device", "h100", *load, "--requests", "20", "--slo", "ttft=5s", "--sensitivity")
    capacity = simulate(localllm, "demo", *flags)["capacity"]
    assert capacity["at_least"] and capacity["amount"] < (21 if load[0] == "--users" else 20_000)
    code, out, _ = localllm("simulate", "demo", *flags)
    text = " ".join(out.split())
    assert code == 0 and re.search("H100 SXM serves at least .*; 20 requests are too few to find more", text)
    assert text.count("at least") > 3


def test_requirement(localllm, llama):
    """A load above the capacity takes the fewest replicas that serve it, or settings that serve it alone."""
    flags = ("--device", "h100", "--requests", "200", "--slo", "ttft=500ms,tpot=24ms", "--rate", "34")
    found = simulate(localllm, llama, *flags)
    replicas, alternatives = found["requirement"]["replicas"], found["requirement"]["alternatives"]
    enough, fewer = (simulate(localllm, llama, *flags, "--replicas", str(replicas - i)) for i in (0, 1))
    assert enough["met"] >= 190 > fewer["met"] and enough["requirement"] is None
    fp8 = next(each for each in alternatives if each["flags"] == "--kv-dtype fp8")
    alone = simulate(localllm, llama, *flags, *fp8["flags"].split())
    assert alone["met"] / 200 == fp8["attainment"]
    code, out, _ = localllm("simulate", llama, *flags)
    text = " ".join(out.split())
    assert code == 0 and fp8["serves"]
    assert f"34 requests/s need {replicas} replicas, or one with --kv-dtype fp8" in text


def test_price_and_power(localllm, llama):
    found = simulate(
        localllm, llama, "--device", "h100", "--rate", "2", "--requests", "40", "--price", "3", "--watts", "700"
    )
    per_token = found["duration_s"] / found["output_tokens"]
    assert found["cost_per_million_tokens"] == pytest.approx(3 / 3600 * per_token * 1e6)
    assert found["joules_per_token"] == pytest.approx(700 * per_token * found["busy"])


def test_replicas(localllm, llama):
    """Three replicas serve more than one, one of them fails, and each costs its own time."""
    flags = ("--device", "h100", "--rate", "60", "--requests", "400", "--price", "3")
    one = simulate(localllm, llama, *flags)
    three = simulate(localllm, llama, *flags, "--replicas", "3", "--kill", "2@2s", "--start-up", "1s")
    assert three["requests"] + three["failed"] == 400 and three["failed"] > 0
    assert three["e2e_s"]["p95"] < one["e2e_s"]["p95"]
    up_s = sum(replica["up_s"] for replica in three["replicas"])
    assert up_s == pytest.approx(3 * three["duration_s"])
    assert three["cost_per_million_tokens"] == pytest.approx(3 / 3600 * up_s / three["output_tokens"] * 1e6)
    code, out, _ = localllm("simulate", llama, *flags, "--replicas", "1..3", "--route", "prefix")
    assert code == 0 and "1 to 3, for 128 requests each; routed by prefix" in " ".join(out.split())
    _, out, _ = localllm("simulate", llama, *flags, "--replicas", "2", "--kill", "1@1s,2@1h")
    assert "replica 1 fails after 1 s; replica 2 fails after 3600 s, when the run has ended" in " ".join(
        out.split()
    )


def test_prompts_apart_and_parallel(localllm, llama):
    flags = ("--device", "h100", "--rate", "5", "--requests", "50", "--link", "25GB/s")
    apart = simulate(localllm, llama, *flags, "--prefill", "1", "--decode", "1")
    assert apart["transfers"] == 50
    assert (
        apart["transferred_bytes"] == apart["prompt_tokens"] * 131_072
    )  # 8 heads of 128, keys and values, 32 layers
    parallel = simulate(localllm, llama, *flags, "--tensor-parallel", "4")
    assert parallel["device"] == "4 x H100 SXM" and "exchanges over 25 GB/s" in parallel["step_times"]


def test_list_price_and_maximum_power(localllm, llama, tmp_path):
    flags = ("--device", "h100", "--rate", "2", "--requests", "40")
    found = simulate(localllm, llama, *flags)
    listed = find_price("H100 SXM")
    assert (found["price_per_hour"], found["watts"]) == (listed.per_hour, 700)
    assert "USD per hour" in found["price_source"] and f"{listed.date:%B %Y}" in found["price_source"]
    code, out, _ = localllm("simulate", llama, *flags)
    text = " ".join(out.split())
    assert code == 0 and f"at {found['price_source']}" in text and "at 700 W" in text

    own = tmp_path / "prices.toml"
    own.write_text('currency = "EUR"\n[devices."h100"]\nper_hour = 2.5\n')
    mine = simulate(localllm, llama, *flags, "--prices", str(own))
    assert mine["price_source"] == "2.5 EUR per hour"
    per_hour = mine["cost_per_million_tokens"] / found["cost_per_million_tokens"]
    assert per_hour == pytest.approx(2.5 / listed.per_hour)
    code, _, err = localllm("simulate", llama, "--device", "a100", "--rate", "2", "--prices", str(own))
    assert code == 2 and "has no price of A100 SXM 80GB" in err


def test_sensitivity(localllm, llama):
    flags = (
        "--device",
        "h100",
        "--rate",
        "3",
        "--requests",
        "60",
        "--slo",
        "ttft=500ms,tpot=20ms",
        "--sensitivity",
    )
    found = simulate(localllm, llama, *flags)
    amounts = {change["assumption"]: change["amount"] for change in found["sensitivity"]}
    assert amounts["step durations -20%"] > found["capacity"]["amount"] > amounts["step durations +20%"]


ONE_USER = ("demo", "--users", "1", "--requests", "20", "--prompt", "200", "--output", "50")


def test_measured_steps(localllm):
    """With recorded steps of the model, this machine's durations are fitted to them."""
    record_steps("demo")
    found = simulate(localllm, *ONE_USER)
    assert found["step_times"].startswith(
        "fitted to 320 steps of up to 8 sequences of demo on this machine; of 80 others, a single one"
    )
    assert found["tpot_s"]["p50"] == pytest.approx(0.003, rel=0.02)


@pytest.mark.parametrize(
    ("recorded", "flags", "reason"),
    [
        ({"batches": (1,)}, (), "recorded decode steps of demo are of one sequence at a time"),
        ({"noise": 2.0}, (), "a fit to the 400 recorded steps of demo is too inaccurate: of 80 others, a single"),
        ({}, ("--drafts", "4"), "decodes with drafts"),
    ],
)
def test_steps_that_determine_no_fit_are_not_used(localllm, recorded, flags, reason):
    """The roofline is used instead, and the output says why and how to record steps."""
    record_steps("demo", **recorded)
    code, out, _ = localllm("simulate", *ONE_USER, *flags, "--json")
    source = json.loads(out)["step_times"]
    assert code == 0 and source.startswith("roofline of this machine") and reason in source
    draft = " --draft" if flags else ""
    assert f"`localllm bench demo{draft} --prompt 64,512 --batch 1,8,32` records what a fit needs" in source


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "give one of --rate, --users and --trace"),
        (("--rate", "1", "--tensor-parallel", "0"), "--tensor-parallel is 0"),
        (("--rate", "1", "--replicas", "0"), "--replicas is '0'"),
        (("--rate", "1", "--replicas", "2", "--kill", "3@1s"), "give a replica from 1 to 2"),
        (("--rate", "1", "--route", "prefix"), "--route needs --replicas"),
        (("--rate", "1", "--replicas", "2", "--route", "random"), "--route is 'random'"),
        (("--rate", "1", "--replicas", "2", "--scale-target", "5"), "--scale-target needs a range"),
        (
            ("--rate", "1", "--replicas", "2", "--start-up", "5s"),
            "--start-up needs a range of --replicas, or --kill",
        ),
        (("--rate", "1", "--link", "50GB/s"), "--link needs --tensor-parallel, --pipeline-parallel or --prefill"),
        (("--rate", "1", "--cache-tokens", "0"), "--cache-tokens is 0"),
        (("--rate", "1", "--prefill", "2"), "--prefill and --decode go together"),
        (("--rate", "1", "--users", "2"), "give one of --rate, --users and --trace"),
        (("--rate", "0"), "--rate is 0"),
        (("--rate", "1", "--batching", "some"), "--batching is 'some'"),
        (("--rate", "1", "--slo", "itl=5ms"), "--slo has itl"),
        (("--rate", "1", "--sensitivity"), "--sensitivity needs objectives"),
        (("--rate", "1", "--efficiency", "1.2"), "--efficiency is '1.2'"),
        (("--rate", "1", "--efficiency", "high"), "--efficiency is 'high'"),
        (("--rate", "1", "--device", "cpu", "--efficiency", "1"), "--efficiency is for GPUs of the catalogue"),
        (("--rate", "1", "--replicas", "1..2", "--scale-target", "0"), "--scale-target is 0"),
        (("--rate", "1", "--slo", "ttft=1s", "--attainment", "2"), "--attainment is 2"),
        (("--rate", "1", "--prompt", "x"), "--prompt is 'x'"),
        (("--trace", "missing.csv"), "missing.csv cannot be read"),
        (("--rate", "1", "--speed", "2"), "--speed needs --trace"),
        (("--rate", "1", "--think", "2s"), "--think needs --users or --turns"),
        (("--trace", "x.csv", "--turns", "2"), "--turns has no effect, because a trace has its own requests"),
        (("--rate", "1", "--batch-size", "4"), "--batch-size needs --batching static or dynamic"),
        (("--rate", "1", "--acceptance", "0.5"), "--acceptance needs --drafts"),
        (("--rate", "1", "--drafts", "2", "--acceptance", "2"), "--acceptance is 2"),
        (("--rate", "1", "--drafts", "-1"), "--drafts is -1"),
        (("--rate", "1", "--price", "0"), "--price is 0"),
        (("--rate", "1", "--expert-parallel"), "among the GPUs of --tensor-parallel"),
        (("--rate", "1", "--gantt", "lanes.pdf"), "neither a PNG nor an SVG file"),
        (("--rate", "1", "--gantt", "-", "--json"), "has no place in JSON"),
        (("--rate", "1", "--host-cache", "64GB,9"), "--host-cache is '64GB,9'"),
        (("--rate", "1", "--disk-cache", "1TB", "--no-prefix-cache"), "hold the prefix cache"),
    ],
)
def test_refused_flags(localllm, flags, message):
    code, out, err = localllm("simulate", "demo", "--device", "h100", *flags)
    assert (code, out) == (2, "") and message in err


SERVER_FLAGS = {  # that --check takes: they describe the load or the server
    "--rate", "--users", "--think", "--trace", "--speed", "--requests", "--seed", "--prompt", "--output",
    "--system", "--burstiness", "--device", "--context", "--quant", "--dtype", "--kv-dtype", "--chunk",
    "--max-running", "--cache-tokens", "--host-cache", "--disk-cache", "--expert-parallel", "--tensor-parallel",
    "--pipeline-parallel", "--link", "--drafts", "--acceptance", "--efficiency", "--check", "--json",
}  # fmt: skip


def test_check_refuses_what_it_cannot_send(localllm):
    """Every flag is either of the load or the server, or refused by name with what to do instead."""
    refused = {flag_name(name): remedy for names, _, remedy in NOT_REPLAYED for name in names}
    parameters = {param.opts[0]: param for param in get_command(app).commands["simulate"].params}
    flags = {flag for flag in parameters if flag.startswith("--")} - {"--help", "--quiet"}
    assert flags == SERVER_FLAGS | refused.keys() and not SERVER_FLAGS & refused.keys()
    values = {"--batching": "static", "--order": "shortest", "--price": "2", "--watts": "300"}
    for flag, remedy in refused.items():
        given = () if parameters[flag].is_flag else (values.get(flag, "2"),)
        code, out, err = localllm("simulate", "demo", "--rate", "1", "--check", "http://localhost:1", flag, *given)
        assert (code, out) == (2, "") and f"{flag} cannot be checked" in err and remedy in err


FEW = ("simulate", "demo", "--device", "h100", "--requests", "6", "--output", "3", "--rate")


def test_lanes_of_requests_follow_the_report_in_80_columns(localllm):
    report, out = localllm(*FEW, "9")[1], localllm(*FEW, "9", "--gantt", "-")[1]
    assert out.startswith(report + "\n")
    *lanes, axis, legend = out.removeprefix(report + "\n").splitlines()
    assert [lane.split()[0] for lane in lanes] == list("123456") and all(" µs" in lane[-6:] for lane in lanes)
    assert axis.startswith("  0 ") and axis.endswith(" ms TTFT") and legend == "· queue  █ prefill  ━ decode"
    assert max(map(len, out.splitlines())) <= 80


def test_a_check_is_printed_and_kept(localllm, tmp_path):
    with ScriptedServer(completions) as server:
        code, out, _ = localllm(*FEW, "90", "--check", server.url)
        found = json.loads(localllm(*FEW, "90", "--check", server.url, "--json")[1])
    assert code == 0 and out.startswith(f"{server.url}, m: 6 requests answered\n")
    rows = [line.split()[:2] for line in out.splitlines() if "PREDICTED" in line or " p50 " in line]
    assert [row[0] for row in rows] == ["PREDICTED", "TTFT", "TPOT", "ITL", "E2E"]
    assert (found["requests"], found["failed"], found["figures"]["ttft_p50_s"]["predicted"] < 0.001) == (
        6,
        0,
        True,
    )
    kept = [json.loads(line) for line in (tmp_path / "home" / "checks.jsonl").read_text().splitlines()]
    assert len(kept) == 2 and kept[1] == found


def test_model_that_does_not_fit(localllm, llama):
    code, _, err = localllm("simulate", llama, "--device", "rtx-4080", "--rate", "1")
    assert code == 3 and "--quant int8" in err
