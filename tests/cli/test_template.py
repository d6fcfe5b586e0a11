import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.cli.app import main
from tests.scripted import write_scripted
from tests.shared import shared

QUESTION = [{"role": "user", "content": "Hi <|im_end|>"}]
PROMPT = "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_scripted(tmp_path_factory.mktemp("chat") / "model", ["<think>", "a"]))


@pytest.fixture
def qwen():
    return str(shared("tokenizers/qwen3"))


@pytest.fixture
def localllm(monkeypatch, capsys):
    import io

    def run(*arguments, piped=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped)))
        code = main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def write(tmp_path, content):
    file = tmp_path / "messages.json"
    file.write_text(json.dumps(content))
    return str(file)


def test_stdout_is_the_prompt_to_the_character(localllm, folder, tmp_path):
    assert localllm("template", folder, "--messages", write(tmp_path, QUESTION)) == (0, PROMPT, "")
    assert localllm("template", folder, "--messages=-", piped=json.dumps(QUESTION).encode())[1] == PROMPT
    without = localllm("template", folder, "--messages", write(tmp_path, QUESTION), "--no-generation-prompt")[1]
    assert without == PROMPT.removesuffix("<|im_start|>assistant\n")


def test_a_prompt_is_read_as_by_run(localllm, folder):
    text = localllm("template", folder, "Hi", "--system", "Be brief.", piped=b"notes\n")[1]
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nnotes\n\nHi<|im_end|>\n")


def test_tokens_are_listed_after_the_prompt(localllm, folder, tmp_path):
    _, out, _ = localllm("template", folder, "é", "--ids")
    prompt, table = out.split("\n\n")
    assert prompt == "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant"
    rows = [line.split(maxsplit=3) for line in table.splitlines()]
    assert rows[0] == ["INDEX", "ID", "TYPE", "TEXT"]
    assert rows[1] == ["0", "256", "control", '"<|im_start|>"']
    assert [row[3] for row in rows[6:10]] == ['"\\n"', '""', '"é"', '"<|im_end|>"']


def test_json_holds_prompt_ids_and_tokens(localllm, folder, tmp_path):
    content = json.loads(localllm("template", folder, "--json", "--messages", write(tmp_path, QUESTION))[1])
    assert content["prompt"] == PROMPT == "".join(token["text"] for token in content["tokens"])
    assert content["token_ids"] == [token["id"] for token in content["tokens"]]
    controls = [token["text"] for token in content["tokens"] if token["kind"] == "control"]
    assert controls == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]  # what the user typed is text


@pytest.mark.slow
def test_tools_thinking_and_arguments_reach_the_template(localllm, qwen, tmp_path):
    file = tmp_path / "tools.json"
    file.write_text(json.dumps([TOOL]))
    _, plain, _ = localllm("template", qwen, "Hi")
    _, with_tools, _ = localllm("template", qwen, "Hi", "--tools", str(file))
    assert json.dumps(TOOL) in with_tools
    whole = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
    assert localllm("template", qwen, "--messages", write(tmp_path, whole))[1] == with_tools
    off = plain + "<think>\n\n</think>\n\n"
    assert localllm("template", qwen, "Hi", "--no-think")[1] == off
    assert localllm("template", qwen, "Hi", "--template-arg", "enable_thinking=false")[1] == off
    assert localllm("template", qwen, "Hi", "--think")[1] == plain


def test_ids_are_those_of_transformers(localllm, qwen, tmp_path):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast.from_pretrained(qwen)
    messages = [{"role": "system", "content": "Kurz."}, {"role": "user", "content": "Grüße 😁  !"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    content = json.loads(localllm("template", qwen, "--json", "--messages", write(tmp_path, messages))[1])
    assert content["token_ids"] == expected


def test_a_folder_with_a_gguf_file_has_the_tokenizer_of_that_file(localllm, qwen, tmp_path):
    shutil.copy(shared("gguf/model-q4_0.gguf"), tmp_path)
    for file in Path(qwen).iterdir():
        shutil.copy(file, tmp_path)
    assert "no chat template" in localllm("template", str(tmp_path), "Hi")[2]  # though the folder has one
    assert localllm("show", str(tmp_path), "--json")[1].count(".gguf") == 1


@pytest.mark.parametrize(
    ("flags", "piped", "code", "message"),
    [
        ([], b"", 2, "the prompt is empty"),
        (["--messages", "none.json"], b"", 2, "none.json cannot be read: No such file or directory"),
        (["--messages=-"], b"{", 2, "stdin is not JSON"),
        (["--messages=-"], b"\xff", 2, "stdin is not valid UTF-8 at byte 0"),
        (["--messages=-"], b"[]", 2, "stdin is not a list of messages; write"),
        (["--messages=-"], b'{"messages": ["Hi"]}', 2, "stdin is not a list of messages; write"),
        (["--messages=-"], b'[{"content": "Hi"}]', 2, "a message has no role"),
        (
            ["--messages=-"],
            b'{"messages": [{"role": "user", "content": "Hi"}], "tools": 3}',
            2,
            "stdin is not a list of tools",
        ),
        (["--messages=-", "--tools=-"], b"[]", 2, "cannot both be stdin"),
        (["--messages=-", "Hi"], b"[]", 2, "--messages cannot be combined with a prompt or --system"),
        (["Hi", "--no-think"], b"", 2, "the chat template has no switch for thinking"),
        (
            ["Hi", "--template-arg=colour=red"],
            b"",
            2,
            "the chat template does not read colour; it reads none at all",
        ),
    ],
)
def test_a_rendering_error_is_one_line(localllm, folder, flags, piped, code, message):
    got, out, err = localllm("template", folder, *flags, piped=piped)
    assert (got, out) == (code, "")
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_models_without_a_template_or_with_a_broken_one(localllm, folder, tmp_path):
    base = write_scripted(tmp_path / "base", ["a"])
    (base / "chat_template.jinja").unlink()
    assert localllm("template", str(base), "Hi")[0] == 2
    (base / "chat_template.jinja").write_text("{% if")
    code, _, err = localllm("template", str(base), "Hi")
    assert (code, "line 1" in err) == (7, True)
    assert localllm("template", str(tmp_path / "none"), "Hi")[0] == 8


def test_a_system_prompt_that_a_template_refuses(localllm, tmp_path):
    source = shared("templates/google-gemma-2-2b-it.jinja").read_text()
    gemma = str(write_scripted(tmp_path / "gemma", ["a"], template=source))
    code, out, err = localllm("template", gemma, "Hi", "--system", "Be brief.")
    assert (code, out) == (2, "")
    assert err == (
        "error: the chat template refuses this conversation: System role not supported; "
        "it may not support system prompts: put it in the first question\n"
    )


def test_neither_weights_nor_torch_are_needed(folder, tmp_path):
    program = (
        "import sys, localllm.cli.app\n"
        "code = localllm.cli.app.main(sys.argv[1:])\n"
        "sys.exit(code or bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "template", folder, "Hi"], input=b"", capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"assistant\n")
