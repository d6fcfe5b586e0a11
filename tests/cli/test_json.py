"""Every `--json` output matches its schema in docs/schemas."""

import copy
import json

import pytest
from jsonschema import Draft202012Validator, ValidationError

from localllm.cli.fast_start import COMMANDS
from localllm.conversation.chat import Chat
from localllm.conversation.session import Session
from localllm.request import SamplingParams
from tests.cli.test_quantize import texts, tiny  # noqa: F401 (fixtures)
from tests.hub.downloaded import download
from tests.hub.folders import write_model
from tests.hub.models import model_files
from tests.server.conftest import demo, serving  # noqa: F401 (a fixture)
from tools.json_docs import FOLDER, comments, schemas
from tools.json_output import JSON_OUTPUTS

WITHOUT = {"serve", "worker", "completion"}  # logs, of which serve has --log-format json, and a script


def validator(command):
    schema = json.loads((FOLDER / f"{command}.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.fixture
def checked(real):
    """Run a command with --json, validate every printed object against its schema, and return the objects."""

    def run(*words, code=0, piped=b""):
        got, out, err = real(*words, "--json", piped=piped)
        assert got == code, err
        command = words[0]
        if JSON_OUTPUTS[command].stdout == "lines":
            objects = [json.loads(line) for line in out.splitlines()]
        else:
            objects = [json.loads(out)]
        assert objects
        for each in objects:
            validator(command).validate(each)
        return objects

    return run


def test_the_schemas_are_those_of_the_types():
    stale = "docs/schemas is stale: run `python tools/cli_docs.py`"
    wanted = schemas()
    assert {file: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.json")} == wanted, stale


def test_every_command_prints_json_or_has_no_use_for_it(real):
    assert {*JSON_OUTPUTS} | WITHOUT == {*COMMANDS}
    for command in COMMANDS:
        assert ("--json " in real(command, "--help")[1]) is (command in JSON_OUTPUTS), command


def test_an_answer(checked, tmp_path):
    paper = tmp_path / "receipt.json"
    flags = (
        "--max-tokens",
        "5",
        "--seed",
        "1",
        "--logprobs",
        "1",
        "--prompt-logprobs",
        "0",
        "--receipt",
        str(paper),
    )
    [answer] = checked("run", "demo", "Hello", *flags)
    assert answer["token_ids"]
    assert checked("replay", str(paper))[0]["identical"]
    changed = copy.deepcopy(answer["receipt"])
    changed["answer"]["token_ids"][2] += 1
    paper.write_text(json.dumps(changed))
    assert not checked("replay", str(paper), code=10)[0]["identical"]


@pytest.mark.slow
def test_output_of_commands_without_an_answer(checked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(checked("embed", "demo", "one", "two")) == 2
    checked("template", "demo", "Hello")
    checked("plan", "demo")
    checked("plan", "demo", "--gpu", "h100:2")
    checked("simulate", "demo", "--rate", "5", "--requests", "20", "--device", "h100", "--slo", "ttft=1s")
    checked("cp", "demo", "mine")
    (tmp_path / "Modelfile").write_text("FROM demo\nSYSTEM Be a cat.\nPARAMETER temperature 0\n")
    checked("create", "cat")
    checked("show", "cat")
    checked("show", str(write_model(tmp_path / "tiny")))
    [models] = checked("list", "--all")
    assert {"demo", "mine", "cat"} < {model["name"] for model in models}
    checked("rm", "mine")


def test_conversations(checked, demo, tmp_path):  # noqa: F811
    session = Session(demo, Chat(demo, SamplingParams(max_tokens=3)), tmp_path / "home" / "chats")
    assert [*session.chat.ask("Hello there")]
    session.save()
    assert checked("chats")[0][0]["questions"] == 1
    assert checked("chats", "hello")[0][0]["place"]["match"] == "Hello"
    checked("chats", "--rm", "last")


@pytest.mark.slow
def test_this_machine(checked):
    checked("doctor", code=0)
    checked("bench", "demo", "demo", "--compare", "--repeat", "6", "--prompt", "8", "--output", "3")


@pytest.mark.slow
def test_models_that_are_quantized_and_compared(checked, tiny, texts, tmp_path):  # noqa: F811
    done = checked(
        "quantize", str(tiny), "--method", "rtn", "--group", "64", *texts[2:], "-o", str(tmp_path / "int4")
    )[-1]
    assert done["quality"]
    assert checked("show", str(tmp_path / "int4"))[0]["quality"] == done["quality"]
    checked("diff", "demo", "demo", "--tokens", "256", "--window", "64")
    checked("run", str(tiny), "Hello", "--raw", "--quant", "int8", "--max-tokens", "3", "--local")
    checked("rm", str(tiny), "--quant", "int8")


def test_models_of_the_hub(checked, hub, cache):
    hub.add("org/tiny", model_files())
    assert {line["event"] for line in checked("pull", "org/tiny")} >= {"begin", "verified", "done"}
    download(hub, "org/other", model_files())
    checked("verify")
    checked("rm", "org/tiny", "org/other")


def test_a_batch(checked, tmp_path):
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    command = ("batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--model", "demo")
    assert [checked(*command)[0]["kept"], checked(*command)[0]["kept"]] == [0, 1]


def test_a_server(checked, demo):  # noqa: F811
    with serving(demo) as url:
        checked("ps", "--server", url)
        checked("top", "--server", url, "--every", "0.2s")
        load = ("--requests", "4", "--prompt", "8", "--output", "3", "--repeat", "1", "--slo", "ttft=5s")
        checked("bench", "--against", url, *load)


def test_output_of_stop(checked, demo):  # noqa: F811
    with serving(demo) as url:
        checked("stop", "demo", "--server", url)


def test_an_extra_or_missing_field_violates_the_schema(checked):
    [prompt] = checked("template", "demo", "Hello")
    for wrong in (prompt | {"more": 1}, {"prompt": ""}, prompt | {"token_ids": ["1"]}):
        with pytest.raises(ValidationError):
            validator("template").validate(wrong)


def test_descriptions_are_the_comments_of_the_fields():
    class Kind:
        plain: int
        said: str  # what it is
        below: float
        """As a text,
        in two lines"""

    assert comments(Kind) == {"said": "what it is", "below": "As a text, in two lines"}
