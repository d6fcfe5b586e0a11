"""`localllm bench` with real models: output formats and exit codes."""

import csv
import io
import json

import pytest

import localllm
from localllm.benchmark.products import find_linears
from localllm.cli.app import main
from localllm.hardware import measure, processor
from localllm.runtime.kernels.cpu.compile import cpu_supported
from tests.shared import shared

SHORT = ("--prompt", "12,20", "--output", 4, "--repeat", 2)


@pytest.fixture
def bench(capsys, monkeypatch):
    """Run `bench` with small ceilings; return exit code, stdout and stderr."""
    monkeypatch.setattr(measure, "BUFFER_BYTES", {"cpu": 2**22})
    monkeypatch.setattr(measure, "MATRIX_ROWS", {"cpu": 64})
    monkeypatch.setattr(measure, "MAX_DURATION_S", 0.01)

    def run(*arguments):
        code = main(["bench", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_text_output(bench):
    code, out, err = bench("demo", *SHORT)
    assert (code, err) == (0, "")
    titles = ("date ", "processor ", "model ", "ceilings ", "SPEED, tokens/s", "LATENCY", "ROOFLINE")
    assert all(any(line.startswith(title) for line in out.splitlines()) for title in titles)
    assert max(map(len, out.splitlines()[:20])) <= 110


def test_json_csv_and_markdown_alone_on_stdout(bench):
    code, out, err = bench("demo", *SHORT, "--json")
    assert (code, err) == (0, "")
    assert [s["prompt"] for s in json.loads(out)["editions"][0]["scenarios"]] == [12, 20]
    code, out, _ = bench("demo", *SHORT, "--csv")
    assert [row["prompt"] for row in csv.DictReader(io.StringIO(out))] == ["12", "20"]
    code, out, _ = bench("demo", *SHORT, "--markdown")
    assert out.startswith("| model | tokens |")


def test_steps_are_recorded_for_simulations(bench, capsys):
    assert main(["simulate", "demo", "--rate", "2", "--requests", "20"]) == 0
    assert "no step of demo was measured" in " ".join(capsys.readouterr().out.split())
    assert bench("demo", "--prompt", "12,20", "--output", 12, "--batch", "1,4", "--repeat", 2)[0] == 0
    assert main(["simulate", "demo", "--rate", "2", "--requests", "20"]) == 0
    reason = "recorded decode steps of demo are of at most 4 sequences at a time"
    assert reason in " ".join(capsys.readouterr().out.split())


def test_products_are_explained(bench):
    code, out, err = bench("demo", *SHORT, "--explain", "--json")
    assert (code, err) == (0, "")
    products = json.loads(out)["editions"][0]["products"]
    with localllm.load("demo", device="cpu") as llm:
        linears = find_linears(llm.worker.engine.runner.model, set())
        matrices = [weight for linear in linears for weight in linear.weights]
    assert sum(product["nbytes"] for product in products) == sum(weight.nbytes for weight in matrices)
    assert sum(product["matrices"] for product in products) == len(matrices)
    assert all(product["bytes_per_s"] > 0 and product["of_memory"] > 0 for product in products)
    packed = [product for product in products if product["decode_kernel"] == "cpu-interleaved"]
    assert packed if cpu_supported() and "int" in products[0]["format"] else not packed
    assert all(product["instructions"] == processor.used_instructions() for product in packed)
    code, out, _ = bench("demo", *SHORT, "--explain")
    assert "PRODUCTS" in out and products[0]["decode_kernel"] in out
    assert json.loads(bench("demo", *SHORT, "--json")[1])["editions"][0]["products"] is None


def test_two_models_are_compared(bench, tmp_path):
    folder, text = shared("stories260K"), tmp_path / "text"
    text.write_text("Lily went to the park. " * 9)
    plot = tmp_path / "a.svg"
    code, out, err = bench(
        "--compare", "demo", folder, "--prompt", 12, "--output", 4, "--repeat", 3, "--text", text, "--plot", plot
    )
    assert (code, err) == (0, "")
    assert "COMPARED " in out and out.count("95% CI") == 3
    assert f"prompts of {text}" in out
    assert plot.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "demo"), "2 models are named; name one, or two with --compare"),
        (("--compare", "demo"), "--compare needs two models; name two, or one with --quant none,int8"),
        (("--compare", "a", "b", "c"), "--compare needs two models"),
        (("demo", "--json", "--csv"), "--json, --csv and --markdown cannot be combined; leave out all but one"),
        (("demo", "--plot", "a.gif"), "a.gif is neither a PNG nor an SVG file; use a name that ends in .png"),
        (("demo", "--repeat", 0), "--repeat is 0; give a whole number from 1"),
        (("demo", "--prompt", "1,x"), "--prompt contains 'x'; give whole numbers from 1, as in 128,512"),
        (("demo", "--quant", "int3"), "--quant contains 'int3'; give none, int8 or int4"),
        (("demo", "--batch", 129), "demo can run none of the scenarios: the engine runs at most 128 streams"),
        (("demo", "--prompt", 9999), "10023 tokens per stream, but the model supports 1024"),
        (("a", "b", "--against", "http://x"), "2 models are named; name at most one, by the servers' name for it"),
        (
            ("--against", "http://x", "--text", "/dev/null"),
            "--text /dev/null contains no words; give another text",
        ),
        (("demo", "--compare", "demo", "--repeat", 2), "2 rounds are too few to compare; use --repeat 3 or more"),
    ],
)
def test_invalid_options_are_rejected_in_one_line(bench, arguments, said):
    code, out, err = bench(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_a_model_that_does_not_exist(bench):
    code, _, err = bench("nowhere/at/all")
    assert code == 8
    assert err.startswith("error: ")
