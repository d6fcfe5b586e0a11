"""`localllm diff` with real models: table, JSON and exit codes."""

import json
import subprocess
import sys

import pytest

from localllm.cli.app import main
from localllm.quality.report import REPORT_FILE, Quality, read_report, write_report
from tests.hub.folders import write_model
from tests.quality.example import QUALITY
from tests.shared import shared


@pytest.fixture
def diff(capsys):
    """Run `diff`; return exit code, stdout and stderr."""

    def run(*arguments):
        code = main(["diff", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_model_in_two_types_as_json(diff, tmp_path):
    code, out, err = diff("demo", "demo", "--dtype", "float32", "--dtype-b", "bfloat16", "--tokens", 300, "--json")
    assert (code, err) == (0, "")
    (tmp_path / REPORT_FILE).write_text(out)
    found = read_report(tmp_path)  # what it prints is the report that is stored
    assert isinstance(found, Quality)
    assert (found.reference.dtype, found.other.dtype) == ("float32", "bfloat16")
    assert 0 < found.distance.divergence.mean.value < 0.01
    assert 0 < found.distance.divergence.median < found.distance.divergence.p99 <= found.distance.divergence.max
    assert 0.9 < found.distance.same_top.value <= 1
    assert [error.name for error in found.layers] == [f"layer {i}" for i in range(6)]
    assert all(0 < error.relative < 0.1 for error in found.layers)
    assert found.reference.weight_bytes == json.loads(out)["other"]["weight_bytes"] == 5_968_904 - header_bytes()
    assert found.recipe is None


@pytest.mark.quick_every(3)
@pytest.mark.parametrize(("kv_dtype", "most"), [("int8", 0.005), ("k8v4", 0.03), ("int4", 0.1)])
def test_a_model_with_itself_over_a_quantized_cache(diff, kv_dtype, most):
    code, out, _ = diff("demo", "demo", "--dtype", "float32", "--kv-dtype-b", kv_dtype, "--tokens", 300, "--json")
    found = json.loads(out)
    assert (code, found["reference"]["kv_dtype"], found["other"]["kv_dtype"]) == (0, None, kv_dtype)
    assert 0 < found["distance"]["divergence"]["mean"]["value"] < most


def header_bytes():
    from localllm.hub.catalog import bundled_folder, catalog

    with (bundled_folder(catalog()["demo"]) / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


@pytest.mark.slow
def test_the_program_compares_safetensors_with_gguf():
    """Run the comparison in its own process."""
    done = subprocess.run(
        [sys.executable, "-m", "localllm", "diff", shared("stories260K"), shared("stories260K-f32.gguf")],
        input=b"",
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    page = done.stdout.decode()
    assert max(map(len, page.splitlines())) <= 80
    lines = {line.split("  ")[0]: " ".join(line.split("  ")[1:]).strip() for line in page.splitlines()}
    assert (lines["reference"], lines["compared"]) == ("stories260K", "stories260K-f32")
    assert lines["perplexity change"] == "0.00% ± 0.00%"
    assert lines["same top token"] == "100.00% ± 0.00%"
    assert page.count("all 64 tokens are identical") == 2


@pytest.mark.slow
def test_a_custom_text_from_a_file_and_from_stdin(diff, tmp_path, monkeypatch):
    file = tmp_path / "text.txt"
    file.write_text("Once upon a time there was a fox. " * 40)
    code, out, err = diff("demo", "demo", "--text", file, "--window", 50, "--json")
    assert (code, err) == (0, "")
    from_file = json.loads(out)
    assert (from_file["text"]["name"], from_file["text"]["window"]) == (str(file), 50)
    with file.open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        from_stdin = json.loads(diff("demo", "demo", "--text", "-", "--window", "50", "--json")[1])
    assert from_stdin["text"] == from_file["text"] | {"name": "stdin"}
    assert from_stdin["distance"] == from_file["distance"]
    assert from_stdin["distance"]["reference_perplexity"]["value"] < 200  # what the demo was made for


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["demo", "no/such-model", "--text", "/nowhere"], 2, "/nowhere cannot be read: No such file"),
        (["demo", "./nowhere"], 8, "there is no folder or file ./nowhere"),
        (["demo", "demo", "--tokens", "40"], 2, "at least 64 are needed"),
        (["demo", "demo", "--tokens", "0"], 2, "--tokens"),
        (
            ["demo", "demo", "--window", "1025"],
            2,
            "a window of 1025 tokens is too large; both models support at most 1024",
        ),
        (["demo", "demo", "--window", "1"], 2, "a window of 1 tokens is too small"),
        (["demo", "demo", "--window", "0"], 2, "a window of 0 tokens is too small"),
        (["demo", "demo", "--dtype-b", "int3"], 2, "there is no dtype 'int3'"),
        (["demo", "demo", "--device", "cuda:7"], 3, "no"),
        (["demo"], 2, "missing argument 'OTHER'"),
    ],
    ids=str,
)
def test_invalid_options_are_rejected(diff, arguments, code, message):
    found, out, err = diff(*arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_models_of_two_tokenizers_are_refused(diff):
    code, out, err = diff("demo", shared("stories260K"))
    assert (code, out) == (2, "")
    assert err == (
        "error: token 0 is '<|begin|>' in demo and '<unk>' in stories260K; "
        "name two models with the same tokenizer\n"
    )


def test_text_that_is_not_utf8_is_refused(diff, tmp_path):
    file = tmp_path / "latin1.txt"
    file.write_bytes(b"caf\xe9")
    code, _, err = diff("demo", "demo", "--text", file)
    assert (code, "is not valid UTF-8 at byte 3" in err) == (2, True)


def test_show_prints_a_quality_report(localllm, tmp_path):
    folder = write_model(tmp_path / "tiny")
    write_report(QUALITY, folder)
    code, out, err = localllm("show", str(folder))
    assert (code, err) == (0, "")
    assert "hidden size" in out
    assert "KL divergence, nats   0.01230 ± 0.000400 on average" in out
    shown = json.loads(localllm("show", str(folder), "--json")[1])
    assert shown["quality"]["distance"]["same_top"] == {"value": 0.951, "error": 0.0042}
    (folder / REPORT_FILE).unlink()
    assert json.loads(localllm("show", str(folder), "--json")[1])["quality"] is None


def test_show_reports_an_unreadable_report_and_prints_the_rest(localllm, tmp_path):
    folder = write_model(tmp_path / "tiny")
    (folder / REPORT_FILE).write_text('{"version": 1, "reference": 3}')
    code, out, err = localllm("show", str(folder))
    assert (code, "hidden size" in out) == (0, True)
    assert err.startswith(
        f"note: {folder / REPORT_FILE} cannot be used: the report has no distance; measure again"
    )
    assert json.loads(localllm("show", str(folder), "--json")[1])["quality"] is None
