"""Receipts of the bundled model: written, changed in one field, and replayed."""

import json
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from localllm.hub.catalog import bundled_folder, catalog

ASKED = ("run", "demo", "Tell me a story about a fox", "--seed=3", "--max-tokens=24")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The receipt of an answer, made by the first test that uses it."""
    return tmp_path_factory.mktemp("receipts") / "fox.json"


@pytest.fixture
def receipt(real, written):
    if not written.exists():
        assert real(*ASKED, "--receipt", str(written))[0] == 0
    return json.loads(written.read_text())


@pytest.fixture
def replay(real, tmp_path):
    """Run `replay` with flags; return exit code, stdout and stderr."""

    def run(content, *flags):
        file = tmp_path / "receipt.json"
        file.write_text(json.dumps(content))
        return real("replay", str(file), *flags)

    return run


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(bundled_folder(catalog()["demo"]), tmp_path / "copy")


def test_a_receipt_records_the_setup_and_the_answer(receipt, real):
    code, out, _ = real(*ASKED, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["receipt"] == receipt
    assert receipt["answer"]["text"] == answer["text"]
    assert receipt["answer"]["token_ids"] == answer["token_ids"]
    assert receipt["question"]["prompt"] == [{"role": "user", "content": ASKED[2]}]
    assert receipt["question"]["params"]["seed"] == 3
    assert (receipt["model"]["source"], receipt["model"]["hash_kind"]) == ("demo", "sha256")
    assert {"I8", "BF16"} == set(receipt["model"]["stored"])
    assert receipt["setup"]["versions"].keys() >= {"localllm", "Python", "torch", "triton", "tokenizers"}
    assert receipt["kernels"].keys() >= {"attention", "linear", "rope_append"}


def test_replay_gives_the_same_answer(receipt, replay):
    assert replay(receipt) == (0, "identical: 24 tokens\n", "")


def test_the_output_of_run_is_a_receipt_and_comes_through_a_pipe(real):
    _, out, _ = real(*ASKED, "--json", "--logprobs=1")
    code, told, err = real("replay", "-", "--json", piped=out.encode())
    assert (code, err) == (0, "")
    assert json.loads(told) == {
        "identical": True,
        "changes": [],
        "same_tokens": 24,
        "then": None,
        "now": None,
        "ends": [],
        "margin": None,
    }


@pytest.mark.slow
def test_another_thread_count_is_noted_and_changes_nothing(receipt, replay, monkeypatch):
    monkeypatch.setenv("LOCALLLM_THREADS", "2")
    assert replay(receipt) == (0, "identical: 24 tokens\n", "note: threads: 1 then, 2 now\n")


def test_a_drawn_seed_is_in_the_receipt_and_so_is_a_text_without_template(real, tmp_path):
    file = str(tmp_path / "receipt.json")
    assert real("run", "demo", "Once", "--raw", "--max-tokens=9", "--receipt", file)[0] == 0
    assert json.loads(Path(file).read_text())["question"]["prompt"] == "Once"
    assert real("replay", file) == (0, "identical: 9 tokens\n", "")


@pytest.mark.parametrize("place", [0, 7, 23])
def test_a_changed_token_is_detected(receipt, replay, place):
    then, now = 700, receipt["answer"]["token_ids"][place]
    receipt["answer"]["token_ids"][place] = then
    code, out, err = replay(receipt, "--json")
    found = json.loads(out)
    assert (code, found["identical"], found["same_tokens"]) == (10, False, place)
    assert (found["then"]["token_id"], found["now"]["token_id"]) == (then, now)
    assert found["margin"] == found["then"]["logprob"] - found["now"]["logprob"] < 0
    assert err == "error: the answer differs; docs/receipts.md lists possible causes\n"
    code, out, _ = replay(receipt)
    assert code == 10
    assert out.startswith(f"differs from token {place} on: {then} {found['then']['text']!r} then, {now} ")
    assert f"({found['then']['logprob']:.4f} and" in out.replace("log probabilities of this model now: ", "")


def test_log_probabilities_are_those_of_the_run(real, replay):
    _, out, _ = real(*ASKED, "--json", "--logprobs=2")
    answer = json.loads(out)
    first, second = answer["logprobs"][5]["top"]
    answer["receipt"]["answer"]["token_ids"][5] = second["token_id"]
    found = json.loads(replay(answer, "--json")[1])
    assert found["now"]["token_id"] == answer["token_ids"][5] == first["token_id"]
    assert found["now"]["logprob"] == pytest.approx(first["logprob"], abs=1e-2)  # bfloat16
    assert found["then"]["logprob"] == pytest.approx(second["logprob"], abs=5e-2)


def test_answers_that_end_early_or_late_are_reported(receipt, replay):
    tokens = receipt["answer"]["token_ids"]
    receipt["answer"]["token_ids"] = tokens[:-1]
    found = json.loads(replay(receipt, "--json")[1])
    assert (found["same_tokens"], found["then"], found["now"]["token_id"]) == (23, None, tokens[-1])
    receipt["answer"]["token_ids"] = [*tokens, 262]
    assert replay(receipt)[:2] == (10, "differs from token 24 on: 262 ' a' then, the end now\n")


def test_the_same_tokens_with_another_text_are_no_identical_answer(receipt, replay):
    receipt["answer"] |= {"text": "Hm", "finish_reason": "stop"}
    code, out, _ = replay(receipt)
    assert code == 10
    assert out.startswith(
        "the same 24 tokens, but\nfinish_reason: stop then, length now\ntext from character 0 on: "
    )


def test_another_seed_differs_where_its_answer_does(receipt, real, replay):
    other = json.loads(real(*ASKED, "--seed=4", "--json")[1])["token_ids"]
    pairs = zip(receipt["answer"]["token_ids"], other, strict=True)
    place = next(i for i, (a, b) in enumerate(pairs) if a != b)
    receipt["question"]["params"]["seed"] = 4
    assert json.loads(replay(receipt, "--json")[1])["same_tokens"] == place


def test_other_changes_are_described(receipt, replay):
    receipt["setup"] |= {"device_name": "An Older Processor", "instructions": ["MMX"]}
    receipt["setup"]["versions"] |= {"torch": "1.0", "tensorflow": "9"}
    receipt["kernels"]["attention"] = ["by-hand"]
    receipt["question"]["prompt"][0]["content"] += "!"
    code, out, err = replay(receipt)
    assert (code, out) == (0, "identical: 24 tokens\n")
    notes = err.splitlines()
    assert all(line.startswith("note: ") for line in notes)
    told = {line.removeprefix("note: ").partition(":")[0] for line in notes}
    assert told == {"device_name", "instructions", "torch", "tensorflow", "prompt", "kernels of attention"}
    assert "note: tensorflow: 9 then, none now" in notes
    assert "note: prompt: 11 tokens then, 12 with others from 9 on now" in notes


def test_a_missing_device_is_replaced_and_noted(receipt, replay):
    receipt["setup"]["device"] = "cuda:97"
    code, _, err = replay(receipt)
    assert code == 0
    assert err.startswith("note: device: cuda:97 then, ")


def test_the_model_may_lie_elsewhere(receipt, replay, copy):
    (copy / "generation_config.json").write_text("{}")
    code, out, err = replay(receipt, "--model", str(copy))
    assert (code, out) == (0, "identical: 24 tokens\n")
    assert err.startswith("note: generation_config.json: sha256 ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_one_changed_weight_is_another_model(receipt, replay, copy, file):
    content = bytearray((copy / file).read_bytes())
    content[-3] = ord(" ") if file == "config.json" else content[-3] ^ 1
    (copy / file).write_bytes(content)
    code, out, err = replay(receipt, "--model", str(copy))
    assert (code, out) == (8, "")
    assert f"is not the model of the receipt: {file} is another; that was demo" in err


def test_a_removed_model_is_reported(receipt, replay):
    receipt["model"]["source"] = "/nowhere/model"
    code, out, err = replay(receipt)
    assert (code, out) == (8, "")
    assert "there is no folder or file /nowhere/model" in err


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "is not JSON"), (b"{}", "is not a receipt"), (b'{"version": 9, "question": 1}', "of version 9")],
)
def test_an_invalid_receipt_loads_no_model(localllm, engine, content, words):
    code, out, err = localllm("replay", "-", piped=content)
    assert (code, out, engine.loaded) == (2, "", [])
    assert err.startswith("error: stdin") and words in err and err.count("\n") == 1


def test_a_receipt_that_does_not_exist(localllm, engine, tmp_path):
    code, _, err = localllm("replay", str(tmp_path / "none.json"))
    assert (code, engine.loaded) == (2, [])
    assert "cannot be read: No such file or directory" in err


def test_a_token_outside_the_vocabulary_is_reported(receipt, replay):
    receipt["answer"]["token_ids"][2] = 2**31 - 1
    code, out, _ = replay(receipt)
    assert (code, out.startswith("differs from token 2 on: 2147483647 '' then, ")) == (10, True)
    receipt["question"]["token_ids"][0] = 2**31 - 1
    code, _, err = replay(receipt)
    assert (code, "2147483647 is not a token of this model" in err) == (2, True)


def test_deterministic_and_a_draft_model_are_kept_to(real, tmp_path):
    """Runs last of the tests with a real model, since its kernels count as used by this process afterwards."""
    file = tmp_path / "receipt.json"
    flags = ("--deterministic", "--draft-model", "demo")
    assert real(*ASKED, *flags, "--receipt", str(file))[0] == 0
    setup = json.loads(file.read_text())["setup"]
    assert (setup["deterministic"], setup["draft_model"]) == (True, "demo")
    assert real("replay", str(file)) == (0, "identical: 24 tokens\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("field", ["tensor_parallel", "pipeline_parallel"])
def test_as_many_processes_recompute_an_answer(real, replay, field):
    code, out, err = real(*ASKED, f"--{field.replace('_', '-')}=2", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["receipt"]["setup"][field] == 2
    assert replay(json.loads(out)) == (0, "identical: 24 tokens\n", "")


class TestWriting:
    """Writing receipts, with the fake engine."""

    def test_a_receipt_is_for_this_user_alone_and_stdout_stays_the_text(self, localllm, model, tmp_path):
        file = tmp_path / "new" / "receipt.json"
        assert localllm("run", model, "hi", "--receipt", str(file)) == (0, "1:hi", "")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert json.loads(file.read_text())["answer"]["text"] == "1:hi"

    def test_a_pipe_and_a_device_are_written_to_and_not_replaced(self, localllm, model, tmp_path):
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        read = []
        reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
        reader.start()
        assert localllm("run", model, "hi", "--receipt", str(pipe))[0] == 0
        reader.join()
        assert json.loads(read[0])["answer"]["finish_reason"] == "stop"
        assert stat.S_ISFIFO(pipe.stat().st_mode)

    def test_a_folder_is_refused_before_the_model_loads(self, localllm, engine, model, tmp_path):
        code, out, err = localllm("run", model, "hi", "--receipt", str(tmp_path))
        assert (code, out, engine.loaded) == (2, "", [])
        assert "is a folder" in err

    def test_numbers_that_are_none_of_json_are_refused_before_the_model_loads(self, localllm, engine, model):
        code, _, err = localllm("run", model, "hi", "--tools=-", piped=b'[{"a": NaN}]')
        assert (code, engine.loaded) == (2, [])
        assert "NaN is not a JSON number" in err

    def test_a_template_argument_that_is_no_json_is_a_text(self, localllm, model, tmp_path):
        file = tmp_path / "receipt.json"
        assert localllm("run", model, "hi", "--template-arg=depth=1e999", "--receipt", str(file))[0] == 0
        assert json.loads(file.read_text())["question"]["template_arguments"] == {"depth": "1e999"}
