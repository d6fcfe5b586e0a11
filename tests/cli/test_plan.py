"""`localllm plan`: text in 80 columns, JSON and exit codes."""

import json
import re
from typing import Any

import pytest

from localllm.cli.app import main
from localllm.cli.fast_start import COMMAND_TABLE
from localllm.cli.plan_page import format_plan
from localllm.hardware import measure
from localllm.hardware.catalog import find_device
from localllm.plan.fit import LoadOptions
from localllm.plan.plan import Expectation, plan_model
from localllm.simulate import apart
from tests.plan.made_up_steps import record_steps
from tests.plan.published import LLAMA_8B, LLAMA_70B, MIXTRAL, header_of, write_sparse


@pytest.fixture
def llama(tmp_path):
    """A folder with the files of Llama 3.1 8B that a plan reads, and a sparse file of the model's size."""
    folder = write_sparse(tmp_path / "llama-8b", LLAMA_8B)
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def test_a_model_that_fits_a_gpu(localllm, llama):
    code, out, err = localllm("plan", llama, "--gpu", "4090", "--context", "8192")
    assert (code, err) == (0, "")
    lines = {line.split("  ")[0]: line for line in out.splitlines() if line}
    assert "16.1 GB" in lines["weights"]
    assert lines["total"].endswith(" of 23.5 GB")
    assert "1.07 GB for 8192 tokens, 131 kB per token" in lines["KV cache"]
    assert lines["device"].endswith("  RTX 4090")
    assert "reads 1.01 TB/s, computes 165 TFLOP/s" in out
    assert lines["fits"].split() == ["fits", "yes"]
    assert "46416 tokens for one user, the model supports 131072" in lines["largest context"]
    assert "5 at once with 8192 tokens each" in lines["users"]
    assert lines["decoding, 8192 tokens cached"].endswith(" tokens/s")
    assert lines["bound by"].endswith("  reading memory")
    assert "best that fits: as stored (bfloat16)" in out
    assert "EXPECTED" not in out  # nothing was measured on that GPU


SLO = ("--slo", "ttft=1s,tpot=25ms", "--think", "5s")


@pytest.mark.slow
def test_users_within_objectives(localllm, llama):
    code, out, err = localllm("plan", llama, "--gpu", "h100:2", "--users", "20", *SLO, "--json")
    assert (code, err) == (0, "")
    plan = json.loads(out)
    serving = plan["serving"]
    assert plan["advice"]["prefill"] is None and plan["advice"]["command"].endswith("--replicas 2")
    [option] = serving["options"]  # the first serves them
    assert serving["choice"] == "" and serving["devices"] == 1 and serving["think_s"] == 5
    assert option["capacity"] >= 20 and option["met"] >= 0.95 and 0 < option["ttft_p95_s"] <= 1
    code, out, _ = localllm("plan", llama, "--gpu", "h100", "--users", "20", *SLO)
    text = " ".join(out.split())
    assert "20 users are served within TTFT <= 1000 ms, TPOT <= 25 ms for 95% of the requests" in text
    assert f"this device serves {option['capacity']}" in text
    assert all(len(line) <= 80 for line in out.splitlines())


UNSERVED = ("plan", "demo", "--users", "3", "--slo", "tpot=0.000001ms")


def test_settings_are_compared_by_one_source_of_durations(localllm, monkeypatch):
    """Steps recorded with one of the other settings alone are not used. A busy machine is measured once."""
    monkeypatch.setattr(measure, "measure", lambda device, dtype: measure.Rates(2e10, 1e10, 1e11, share=0.5))
    record_steps("demo", kv_dtype="int8")
    code, out, err = localllm(*UNSERVED, "--json")
    serving = json.loads(out)["serving"]
    assert code == 0 and err.count("so the measurement is not saved") == 1
    assert [option["flags"] for option in serving["options"]] == ["", "--kv-dtype int8"]
    assert all(option["step_times"].startswith("roofline") for option in serving["options"])
    assert serving["not_compared"] == []


def test_settings_without_recorded_steps_are_not_compared_with_others(localllm):
    record_steps("demo")
    code, out, _ = localllm(*UNSERVED, "--json")
    serving = json.loads(out)["serving"]
    [option] = serving["options"]
    assert (
        code == 0 and option["step_times"].startswith("fitted") and serving["not_compared"] == ["--kv-dtype int8"]
    )
    _, out, _ = localllm(*UNSERVED)
    reason = "not compared, because no steps to fit to were recorded with them (see `bench`): --kv-dtype int8"
    assert reason in " ".join(out.split())
    record_steps("demo", kv_dtype="int8")
    _, out, _ = localllm(*UNSERVED, "--json")
    serving = json.loads(out)["serving"]
    assert [option["flags"] for option in serving["options"]] == ["", "--kv-dtype int8"]
    assert all(option["step_times"].startswith("fitted") for option in serving["options"])


def test_several_machines_are_advised_a_division(localllm, tmp_path):
    folder = write_sparse(tmp_path / "llama-70b", LLAMA_70B)
    (folder / "tokenizer.json").write_text("{}")
    machines = ("plan", str(folder), "--context", "4096", "--gpu", "h100:4", "--machines", "2")
    code, out, _ = localllm(*machines)
    assert code == 3 and all(len(line) <= 80 for line in out.splitlines() if str(folder) not in line)
    assert "divide it within a machine: localllm serve" in " ".join(out.split())
    code, out, _ = localllm(*machines, "--json")
    plan = json.loads(out)
    advice = plan["advice"]
    assert advice["command"].endswith("--tensor-parallel 2 --context 4096 --replicas 4 --cluster") and (
        advice["devices"],
        advice["machines"],
    ) == (4, 2)
    assert "--tensor-parallel 2 fits" in plan["remedy"]
    one, two, four = advice["arrangements"]
    assert not one["fits"] and one["refusal"] and two["engines"] == 4 and four["tensor_parallel"] == 4
    assert two["weight_bytes"] > 1.9 * four["weight_bytes"] and two["tpot_s"] > 1.5 * four["tpot_s"]
    code, out, _ = localllm(*machines, "--tensor-parallel", "2", "--json")
    plan = json.loads(out)
    assert code == 0 and plan["fits"] and plan["weight_bytes"] == two["weight_bytes"]
    assert plan["kv_bytes_per_token"] == 2 * 4 * 128 * 80 * 2  # half of the 8 key and value heads


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["--gpu", "h100:8", "--machines", "2"], "--replicas 16 --cluster"),
        (["--gpu", "h100:8"], "--replicas 8"),
        (["--gpu", "l4:2", "--quant", "int4", "--context", "4096"], "--quant int4 --context 4096 --replicas 2"),
        (["--gpu", "rtx 3080:2", "--kv-dtype", "int8"], "--tensor-parallel 2 --kv-dtype int8"),
        (["--gpu", "rtx 3080:4"], "--tensor-parallel 2 --replicas 2"),
    ],
    ids=str,
)
def test_advised_commands_have_flags_of_serve(localllm, llama, arguments, flags):
    _, out, _ = localllm("plan", llama, *arguments, "--json")
    command = json.loads(out)["advice"]["command"]
    assert command == f"localllm serve {llama} {flags}"
    _, out, _ = localllm("plan", llama, *arguments)
    assert out.endswith(f":\n  {command}\n")
    serve = json.loads(COMMAND_TABLE.read_text(encoding="utf-8"))["commands"]["serve"]
    assert {word for word in command.split() if word.startswith("--")} <= set(serve["options"])


@pytest.mark.parametrize("pays", [True, False])
def test_processes_for_prompts_are_advised_where_they_pay(localllm, llama, monkeypatch, pays):
    loads = []

    def compare(target, load, prefill, decode):
        loads.append((load.prompt.median, prefill, decode))
        return apart.Comparison(target, load, {"ttft": 1.0}, prefill, decode, 2.0, 2.5 if pays else 1.5)

    monkeypatch.setattr(apart, "compare_apart", compare)
    flags = ("plan", llama, "--gpu", "h100:3", "--users", "8")
    _, out, _ = localllm(*flags, "--json")
    advice = json.loads(out)["advice"]
    assert loads == [(512, 2, 1)]  # the load by which `serve --prefill` decides
    if not pays:
        assert advice["prefill"] is None and advice["command"].endswith("--replicas 3")
        return
    assert advice["command"] == f"localllm serve {llama} --prefill 2"
    prefill = advice["prefill"]
    assert (prefill["prefill"], prefill["decode"]) == (2, 1)
    assert (prefill["requests_per_s"], prefill["requests_per_s_together"]) == (2.5, 2.0)
    loads.clear()
    _, out, _ = localllm(*flags, "--prompt", "900")
    assert loads == [(512, 2, 1), (900, 2, 1)]
    assert "3 engines with a GPU each would serve 2.00 requests/s within ttft=1.00 s" in " ".join(out.split())
    _, out, _ = localllm("plan", llama, "--gpu", "h100:8", "--users", "8")
    assert out.endswith(f"localllm serve {llama} --prefill 4 --decode 4\n")
    loads.clear()
    for others in (["--machines", "2"], ["--users", "1"], ["--gpu", "h100"], ["--gpu", "rtx 3080:2"]):
        localllm(*flags, *others)
    assert not loads  # one machine, several users, several GPUs, and a model that fits one


def test_whole_experts_of_a_mixture(localllm, tmp_path):
    folder = write_sparse(tmp_path / "mixtral", MIXTRAL)
    (folder / "tokenizer.json").write_text("{}")
    flags = ("plan", str(folder), "--gpu", "h100:2", "--tensor-parallel", "2", "--expert-parallel")
    code, out, _ = localllm(*flags)
    assert code == 0 and "\n2 experts  1 " in out and "computes them one by one" in out
    assert all(len(line) <= 80 for line in out.splitlines() if str(folder) not in line)
    _, out, _ = localllm(*flags, "--json")
    plan = json.loads(out)
    ways = plan["advice"]["arrangements"]
    assert plan["expert_parallel"] and [way["expert_parallel"] for way in ways] == [False, False, True]
    code, _, err = localllm("plan", str(folder), "--gpu", "h100:2", "--expert-parallel")
    assert code == 2 and "among the processes of --tensor-parallel" in err


@pytest.mark.slow
def test_settings_that_serve_more_users(localllm, llama):
    """16 GB of weights leave a 24 GB card few users; quantized ones more."""
    flags = ("--gpu", "4090", "--users", "400", "--prompt", "600", "--output", "60", *SLO)
    _, out, _ = localllm("plan", llama, *flags, "--json")
    serving = json.loads(out)["serving"]
    assert [option["flags"] for option in serving["options"]][:3] == ["", "--kv-dtype fp8", "--quant int8"]
    best = max(option["capacity"] for option in serving["options"])
    assert best > serving["options"][0]["capacity"] > 0
    assert serving["choice"] is None and serving["devices"] == -(-400 // best)
    assert serving["prompt"].startswith("600 ") and serving["output"].startswith("60 ")
    _, out, _ = localllm("plan", llama, *flags, "--quant", "int4", "--kv-dtype", "int8", "--json")
    [only] = json.loads(out)["serving"]["options"]
    assert only["flags"] == "--quant int4 --kv-dtype int8"


def test_flags_of_simulated_users(localllm, llama):
    code, _, err = localllm("plan", llama, "--gpu", "h100", "--think", "5s")
    assert code == 2 and "--think needs --slo" in err
    code, _, err = localllm("plan", llama, "--gpu", "h100", "--slo", "itl=5ms")
    assert code == 2 and "itl" in err


def test_keys_and_values_in_8_bits(localllm, llama, monkeypatch):
    code, out, _ = localllm("plan", llama, "--gpu", "4090", "--context", "8192", "--kv-dtype", "int8")
    assert code == 0
    assert "545 MB for 8192 tokens, 66.6 kB per token in int8" in out
    monkeypatch.setenv("LOCALLLM_KV_DTYPE", "fp8")
    _, out, _ = localllm("plan", llama, "--gpu", "4090", "--json")
    plan = json.loads(out)
    assert (plan["dtype"], plan["kv_dtype"]) == ("bfloat16", "fp8")
    _, out, _ = localllm("plan", llama, "--gpu", "4090", "--context", "8192", "--kv-dtype", "k8v4")
    assert "50.7 kB per token in k8v4" in out
    code, _, err = localllm("plan", llama, "--gpu", "4090", "--kv-dtype", "int2")
    assert code == 2 and "keys and values" in err


def test_a_model_that_does_not_fit_is_planned_and_exits_with_3(localllm, tmp_path):
    folder = write_sparse(tmp_path / "llama-70b", LLAMA_70B)
    (folder / "tokenizer.json").write_text("{}")
    code, out, err = localllm("plan", str(folder), "--gpu", "h100", "--context", "4096")
    assert (code, err) == (3, "")
    verdict = " ".join(out.split())
    assert "fits no: the weights of llama-70b need 141 GB in bfloat16, 79.5 GB are free" in verdict
    assert "--quant int8 takes 71.6 GB and fits" in verdict
    assert "1.34 GB for 4096 tokens" in out
    assert "best that fits: INT8" in out


def test_json_has_every_number(localllm, llama):
    code, out, _ = localllm("plan", llama, "--gpu", "h100 sxm", "--users", "4", "--prompt", "100", "--json")
    plan = json.loads(out)
    assert (code, plan["fits"], plan["remedy"], plan["expected"]) == (0, True, None, None)
    assert (plan["device"]["name"], plan["users"], plan["prompt"]) == ("H100 SXM", 4, 100)
    assert plan["kv_bytes"] == 4 * plan["kv_bytes_per_sequence"] == 4 * plan["context"] * 131_072
    assert [choice["quant"] for choice in plan["quantizations"]] == [None, "q8_0", "int8", "q4_k_m", "int4"]
    assert plan["quantizations"][0]["ceiling"] == plan["ceiling"]
    assert plan["best"] == "bfloat16"
    code, out, _ = localllm("plan", llama, "--gpu", "a100 40gb", "--context", "131072", "--users", "2", "--json")
    plan = json.loads(out)
    assert (code, plan["fits"], plan["allocated_bytes"]) == (3, False, None)
    assert plan["remedy"].startswith("--context ")


def test_the_expected_speed_on_this_machine_is_below_the_ceiling(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LOCALLLM_HOME", str(tmp_path / "home"))
    assert main(["plan", "demo", "--json"]) == 0
    captured = capsys.readouterr()
    plan = json.loads(captured.out)
    assert captured.err == "" or captured.err.startswith("note: other programs kept")
    assert plan["device"]["measured"]
    assert 0 < plan["expected"]["tokens_per_s"] < plan["ceiling"]["tokens_per_s"]
    assert plan["expectation"] == "matrix products in this model's format and size"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h100x"], "the catalogue has no device 'h100x'"),
        (["--gpu", "h100", "--device", "cpu"], "leave one of them out"),
        (["--gpu", "h100", "--context", "999999999"], "give a whole number up to 131072"),
        (["--gpu", "h100", "--users", "0"], "0 is not a number of users"),
        (["--gpu", "h100", "--prompt", "0"], "a prompt of 0 tokens is not possible"),
        (["--gpu", "h100", "--quant", "int3"], "use one of int8, int4, q8_0, q4_k_m"),
        (["--gpu", "h100:0"], "'0' is not a number of devices"),
        (["--gpu", "h100", "--machines", "0"], "--machines is 0"),
        (["--gpu", "h100", "--machines", "2", "--network", "fast"], "--network is 'fast'"),
        (["--gpu", "h100", "--network", "1GB/s"], "--network is between machines"),
        (["--gpu", "h100", "--tensor-parallel", "2", "--slo", "ttft=1s"], "--slo plans for one device"),
        (["--gpu", "h100", "--dtype", "int3"], "there is no dtype 'int3'"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected(localllm, llama, arguments, message):
    code, out, err = localllm("plan", llama, *arguments)
    assert (code, out) == (2, "")
    assert message in err


# The page that `localllm plan` prints: what is on it, and that a terminal of 80 columns holds it.

RATES = Expectation(bandwidth=1e10, flops=1e11, step_s=0.01, source="123 answers of this machine")


@pytest.mark.parametrize(
    ("config", "gpu", "wish"),
    [
        (LLAMA_70B, "h100", LoadOptions(4096, users=1000, quant="int4")),
        (LLAMA_70B, "rtx pro 6000 blackwell", LoadOptions(131_072, users=30)),
        (LLAMA_8B, "a100", LoadOptions()),
        (LLAMA_8B, "rtx pro 6000 blackwell", LoadOptions(users=12, kv_dtype="fp8")),
        (LLAMA_8B, "h200", LoadOptions(1024, users=64)),
        (LLAMA_8B | {"max_position_embeddings": 10**6}, "h200", LoadOptions(users=10**6)),
    ],
    ids=str,
)
def test_every_line_fits_a_terminal_of_80_columns(config: dict[str, Any], gpu: str, wish: LoadOptions) -> None:
    for rates in (RATES, None):
        name = "an-owner/a-model-of-some-name"
        page = format_plan(plan_model(header_of(config), find_device(gpu), wish, name=name, expectation=rates))
        assert max(map(len, page.splitlines())) <= 80, page


def test_expected_and_ceiling_are_side_by_side() -> None:
    found = plan_model(
        header_of(LLAMA_8B), find_device("h200"), LoadOptions(1024, users=64), name="llama", expectation=RATES
    )
    rows = {line.split("  ")[0]: line.split("  ")[1:] for line in format_plan(found).splitlines()}
    assert [cell.strip() for cell in rows["SPEED"] if cell] == ["AT MOST", "EXPECTED"]
    together = [cell.strip() for cell in rows["all users"] if cell]
    assert [cell.split(" of ")[1] for cell in together] == ["64", "8"]  # the engine answers so many at once
    assert "expected from 123 answers of this machine" in rows


def test_rows_of_different_contexts_are_marked_incomparable() -> None:
    of_each, of_one = (
        format_plan(plan_model(header_of(LLAMA_8B), find_device("4090"), wish, name="llama"))
        for wish in (LoadOptions(), LoadOptions(1024))
    )
    assert "each row's own context" in of_each
    assert "each row's own context" not in of_one


def test_a_gpu_that_was_never_measured_has_an_estimate_that_says_so() -> None:
    options = LoadOptions(1024, users=2)
    page = format_plan(plan_model(header_of(LLAMA_8B), find_device("h200"), options, name="llama"))
    rows = {line.split("  ")[0]: line.split("  ")[1:] for line in page.splitlines()}
    assert [cell.strip() for cell in rows["SPEED"] if cell] == ["AT MOST", "ESTIMATED"]
    [ceiling, span] = [cell.strip() for cell in rows["decoding, 1024 tokens cached"] if cell]
    slowest, fastest = (float(number) for number in re.findall(r"[\d.]+", span))
    assert 0 < slowest < fastest < float(ceiling.split()[0])
    assert [cell.strip() for cell in rows["TTFT of 512 tokens"] if cell][1] == "-"
    assert "estimated from the bytes and instructions of its kernels for sm_90, not measured" in rows


def test_a_gpu_that_is_too_old_is_refused(localllm, llama) -> None:
    code, out, err = localllm("plan", llama, "--gpu", "v100")
    assert (code, out) == (2, "")
    assert "the V100 is not supported: it is sm_70, and kernels need sm_80 or newer" in err
