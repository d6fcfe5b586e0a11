"""`localllm quantize` as real processes: output, exit codes and files, however it ends."""

import io
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import localllm
from localllm.checkpoint.header import read_header
from localllm.cli.app import main
from localllm.errors import ModelNotFound, UsageError
from localllm.hub.resolve import resolve_model
from localllm.quantize.store import find_artefact
from localllm.request import SamplingParams
from tests.shared import shared
from tests.tiny import make_checkpoint

LAYERS = 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("models") / "a tiny one"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    make_checkpoint(
        folder, "Llama", vocab_size=512, num_hidden_layers=LAYERS, max_position_embeddings=512, **sizes
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared("stories260K") / name, folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Flags that set short texts for calibration and evaluation."""
    whole = shared("text/tiny.txt").read_text(encoding="utf-8")
    (tmp_path / "calib.txt").write_text(whole[:12_000], encoding="utf-8")
    (tmp_path / "eval.txt").write_text(whole[20_000:22_000], encoding="utf-8")
    return ["--calib", str(tmp_path / "calib.txt"), "--eval", str(tmp_path / "eval.txt")]


def begin(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "localllm", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def run(*arguments: object) -> tuple[int, str, str]:
    process = begin(*arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def events(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def content(folder: Path) -> dict[str, bytes]:
    """Contents of all files except the report, which contains times."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "quality.json"}


@pytest.mark.slow
def test_the_result_runs_and_contains_its_report(tiny: Path, tmp_path: Path, texts: list[str]) -> None:
    target = tmp_path / "small"
    code, out, err = run("quantize", tiny, "-o", target, "--method", "rtn", "--bits", 8, *texts[2:])
    assert (code, err) == (0, "")
    assert out.endswith(f"\n{target}\n") and "KL divergence" in out and "rtn, INT8 with a scale per row" in out
    report = json.loads((target / "quality.json").read_text())
    assert report["recipe"]["method"] == "rtn" and report["matrices"][0]["relative"] < 0.02
    assert read_header(resolve_model(str(target)).path).quantization == "pack-quantized"
    with localllm.load(target) as llm:
        assert llm.generate("Once", SamplingParams(max_tokens=3)).token_ids


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bytes(tiny: Path, tmp_path: Path, texts: list[str]) -> None:
    flags = ["--method", "gptq", "--group", 32, *texts, "--json"]
    code, out, _ = run("quantize", tiny, "-o", tmp_path / "once", *flags)
    assert code == 0
    parts = [event["part"] for event in events(out) if event["event"] == "part"]
    assert len(parts) == LAYERS + 2
    assert events(out)[-1]["quality"] == json.loads((tmp_path / "once" / "quality.json").read_text())
    draw, target, reached = random.Random(0), tmp_path / "often", -1
    while reached < len(parts) - 2:
        process = begin("quantize", tiny, "-o", target, *flags)
        assert process.stdout
        seen = 0
        while seen <= reached + 1 + draw.randrange(2) and process.stdout.readline():
            seen += 1
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert not target.exists() and not (tmp_path / "often.partial" / "config.json").exists()
        with pytest.raises(ModelNotFound):
            resolve_model(str(tmp_path / "often.partial"))
        reached = max(seen, reached + 1)
    code, out, err = run("quantize", tiny, "-o", target, *flags)
    assert (code, err) == (0, "")
    assert content(target) == content(tmp_path / "once")
    assert not (tmp_path / "often.partial").exists()


@pytest.mark.slow
def test_ctrl_c_keeps_finished_layers_and_says_how_to_resume(tiny: Path, tmp_path: Path, texts: list[str]) -> None:
    target = tmp_path / "small"
    process = begin("quantize", tiny, "-o", target, "--method", "gptq", "--group", 32, *texts, "--json")
    assert process.stdout and json.loads(process.stdout.readline())["event"] == "part"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (130, "interrupted; run the same command again to resume\n")
    assert (tmp_path / "small.partial" / "recipe.json").is_file() and not target.exists()


@pytest.mark.slow
def test_a_gguf_file_and_how_far_it_is_from_its_source(tiny: Path, tmp_path: Path, texts: list[str]) -> None:
    file = tmp_path / "small.gguf"
    code, out, err = run("quantize", tiny, "-o", file, "--to", "gguf", "--type", "q4_0", *texts[2:], "--json")
    assert (code, err) == (0, "")
    *parts, done = events(out)
    assert (done["event"], done["path"]) == ("done", str(file)) and parts[-1]["done"] == parts[-1]["of"]
    assert done["quality"]["distance"]["divergence"]["mean"]["value"] > 0
    assert read_header(file).quantization == "gguf"


def test_the_report_is_of_the_written_folder(
    tiny: Path, tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", str(tiny), "-o", "demo", "--method", "rtn", "--bits", "8", *texts[2:]]) == 0
    report = json.loads((tmp_path / "demo" / "quality.json").read_text())
    assert report["other"]["weight_bytes"] == read_header(tmp_path / "demo").stored_bytes


def test_a_text_that_is_too_short_to_measure_on_is_refused_before_any_work(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("Once.")
    flags = ["--eval", str(tmp_path / "short.txt")]
    for target in ("small", "small.gguf"):
        to = ["--to", "gguf"] if target.endswith(".gguf") else ["--bits", "8"]
        assert main(["quantize", str(tiny), "-o", str(tmp_path / target), *to, *flags]) == 2
        assert "at least 64 are needed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_an_unknown_quantization_is_reported_before_a_model_is_pulled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert main(["run", "org/nothing", "Once", "--quant", "q4_k_m"]) == 2
    assert "there is no quantization 'q4_k_m'; use one of int8, int4" in capsys.readouterr().err
    with pytest.raises(UsageError, match="there is no quantization 'q4_k_m'"):
        localllm.load("org/nothing", quant="q4_k_m")


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (["--method", "magic"], 2, "--method is 'magic'; give one of rtn, gptq, awq, smoothquant"),
        (["--bits", "3"], 2, "3 bits are not supported"),
        (["--group", "48"], 2, "groups of 48 are not supported"),
        (["--activations", "fp4"], 2, "--activations is 'fp4'"),
        (["--activations", "int8", "--bits", "4"], 2, "activations can be quantized only with"),
        (["--method", "awq", "--activations", "int8"], 2, "awq quantizes weights only"),
        (["--to", "onnx"], 2, "--to is 'onnx'"),
        (["--to", "gguf", "--type", "q5_k"], 2, "'q5_k' is not a supported GGUF type"),
        (["--to", "gguf", "--bits", "4"], 2, "--bits does not apply to --to gguf"),
        (["--type", "q4_0"], 2, "--type applies only to --to gguf"),
        (["--calib", "nowhere.txt"], 2, "nowhere.txt cannot be read"),
        (["--bits", "0"], 2, "0 bits are not supported"),
        (["--method", "rtn", "--calib", __file__], 2, "--method rtn uses no calibration text"),
        (["--calib", "-", "--eval", "-"], 2, "--calib and --eval cannot both be stdin"),
        (["-o", ""], 2, "--output '' has no file name"),
        (["-o", ".."], 2, "--output '..' has no file name"),
    ],
)
def test_invalid_options_are_rejected_before_any_work(
    flags: list[str], code: int, sentence: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(tiny), "-o", str(tmp_path / "small.gguf"), *flags]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and sentence in captured.err and captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_group_that_does_not_divide_and_a_text_that_is_too_short(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", str(tiny), "-o", str(tmp_path / "small")]) == 2
    assert "groups of 128 do not divide the 64 columns of" in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("Once.")
    flags = ["--group", "32", "--calib", str(tmp_path / "short.txt")]
    assert main(["quantize", str(tiny), "-o", str(tmp_path / "small"), *flags]) == 2
    assert "the calibration text has" in capsys.readouterr().err
    flags = ["--group", "32", "--eval", str(tmp_path / "short.txt")]
    assert main(["quantize", str(tiny), "-o", str(tmp_path / "small"), *flags]) == 2
    assert "use a longer text" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


@pytest.mark.slow
def test_experts_that_hardly_any_token_reached_are_named(
    tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sparse"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 16}
    experts = {"num_experts": 256, "num_experts_per_tok": 1, "max_position_embeddings": 512}
    make_checkpoint(folder, "Qwen3Moe", vocab_size=512, num_hidden_layers=1, **sizes, **experts)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared("stories260K") / name, folder)
    target = tmp_path / "small"
    capsys.readouterr()
    assert main(["quantize", str(folder), "-o", str(target), "--method", "awq", "--group", "32", *texts]) == 0
    told = capsys.readouterr().err
    assert "expert matrices were rounded to nearest" in told and "layers.0.mlp.experts." in told
    assert "..." in told and told.count("\n") == 1


def test_quantized_or_missing_models_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "small")
    for model, code, sentence in (
        ("demo", 2, "is already quantized (int-quantized), and quantizing twice adds the errors; name the"),
        (str(shared("stories260K-f32.gguf")), 2, "is a GGUF file, but only safetensors can be quantized"),
        ("org/nothing", 8, "run `localllm pull org/nothing`"),
    ):
        assert main(["quantize", model, "-o", target, "--bits", "8"]) == code
        assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_existing_output_is_replaced_only_on_request(
    tiny: Path, tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["quantize", str(tiny), "-o", str(tmp_path / "small"), "--method", "rtn", "--bits", "8", *texts[2:]]
    assert main(command) == 0
    assert main(command) == 2
    assert "add --force to replace it" in capsys.readouterr().err
    assert main([*command, "--force", "--asymmetric"]) == 0
    assert json.loads((tmp_path / "small" / "recipe.json").read_text())["recipe"]["symmetric"] is False
    assert main([*command[:3], str(tiny), *command[4:], "--force"]) == 2
    assert "was not written by localllm" in capsys.readouterr().err
    assert read_header(tiny).quantization is None


def test_a_quantized_copy_is_saved_listed_shown_and_removed(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, home = str(tiny.resolve()), tmp_path / "home"
    command = ["run", source, "Once", "--raw", "--max-tokens", "2", "--seed", "1", "--quant", "int4"]
    for told in (f"quantizing {Path(source).name} to INT4; the result is cached for later runs\n", ""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        assert (main(command), capsys.readouterr().err) == (0, told)
    assert main(["list", "--json"]) == 0
    [listed] = [entry for entry in json.loads(capsys.readouterr().out) if entry["state"] == "quantized"]
    assert listed["name"] == f"{shlex.quote(source)} --quant int4" and listed["path"] == str(
        find_artefact(home, tiny, "int4")
    )
    assert main(["show", source, "--quant", "int4"]) == 0
    assert "pack-quantized" in capsys.readouterr().out
    newer = find_artefact(home, tiny, "int4")
    assert newer
    for digest in ("0" * 12, "f" * 12):  # of weights that lay here before
        shutil.copytree(newer.parent, newer.parent.with_name(f"tiny@{digest}"))
    assert main(["show", source, "--quant", "int4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(newer)
    for digest in ("0" * 12, "f" * 12):
        shutil.rmtree(newer.parent.with_name(f"tiny@{digest}"))
    assert main(["rm", source, "--quant", "int4", "--json"]) == 0
    [removed] = json.loads(capsys.readouterr().out)
    assert removed["freed_bytes"] > 100_000 and find_artefact(home, tiny, "int4") is None
    assert main(["rm", source, "--quant", "int4"]) == 8
    assert "has not been quantized to int4" in capsys.readouterr().err
    for command in (["run", source, "Once"], ["show", source], ["rm", source]):
        assert main([*command, "--quant", "int3"]) == 2
        assert "there is no quantization 'int3'; use one of int8, int4\n" in capsys.readouterr().err
