import io
import json
import subprocess
import sys

import pytest

from localllm.cli.app import main

PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Lily", "Tom"]}, "age": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def nothing_piped(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))


@pytest.fixture
def schema(tmp_path):
    file = tmp_path / "person.json"
    file.write_text(json.dumps(PERSON))
    return str(file)


def program(*arguments, piped=b""):
    command = [sys.executable, "-m", "localllm", *arguments]
    return subprocess.run(command, input=piped, capture_output=True, timeout=120)


@pytest.mark.slow
def test_piped_json_satisfies_the_schema(schema):
    done = program("run", "demo", "--schema", schema, "--seed", "1", "--max-tokens", "200", piped=b"Who is there?")
    assert done.returncode == 0 and done.stderr == b""
    person = json.loads(done.stdout)
    assert person["name"] in ("Lily", "Tom") and 1 <= person["age"] <= 9


@pytest.mark.parametrize(
    ("flags", "content", "answers"),
    [
        (["--choice", "yes,no"], None, {"yes", "no"}),
        (["--choice", '["a, b", "c"]'], None, {"a, b", "c"}),
        (["--regex", "(ja|nein)"], None, {"ja", "nein"}),
        (["--grammar"], 'start: "x" | "y"', {"x", "y"}),
        (["--grammar"], "root ::= [xy]", {"x", "y"}),
    ],
)
def test_other_kinds_of_answers(flags, content, answers, tmp_path, capsys):
    if content:
        (tmp_path / "grammar").write_text(content)
        flags = [*flags, str(tmp_path / "grammar")]
    assert main(["run", "demo", *flags, "Which one?"]) == 0
    captured = capsys.readouterr()
    assert captured.out in answers and captured.err == ""


def test_a_truncated_answer_stays_on_stdout_with_its_own_exit_code(schema, capsys):
    assert main(["run", "demo", "--schema", schema, "--max-tokens", "2", "Who?"]) == 5
    captured = capsys.readouterr()
    assert captured.out.startswith("{")
    assert "note: the answer was cut by --max-tokens (2)" in captured.err
    assert captured.err.splitlines()[-1].startswith("error: the answer is not JSON")
    assert main(["run", "demo", "--schema", schema, "--max-tokens", "2", "--fail-on-length", "Who?"]) == 6


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (["--max-tokens", "20"], "--max-tokens (20); raise it"),
        (["--max-tokens", "200", "--context", "40"], "the context (40 tokens)"),
        (["--context", "40"], "the context (40 tokens)"),
    ],
)
def test_an_answer_that_is_closed_early_names_the_limit_that_closed_it(limits, named, tmp_path, capsys):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}))
    bias = ["--logit-bias", "4=-inf"]
    assert main(["run", "demo", "Once", "--schema", str(file), "--seed", "3", *limits, *bias]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["a"]
    assert f"note: the answer was cut by {named}" in captured.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--choice", "a", "--regex", "b"],
            "--regex and --choice cannot be combined; leave one of them out",
        ),
        (["--schema", "none.json"], "none.json cannot be read"),
        (["--choice", "a,,b"], "give a list of non-empty strings"),
        (["--regex", "a("], "unclosed group"),
        (["--choice", "a", "--ignore-eos"], "--ignore-eos cannot be used with a grammar"),
    ],
)
def test_invalid_options_are_reported_before_anything_is_loaded(flags, said, localllm, engine, model):
    code, out, err = localllm("run", model, *flags, "Which?", piped=b"[]")
    assert (code, out) == (2, "") and said in err
    assert engine.loaded == []


@pytest.mark.parametrize(
    ("content", "flag", "said"),
    [
        ('{"uniqueItems": true}', "--schema", "the schema's uniqueItems at # is not supported"),
        ('{"enum": []}', "--schema", "anyOf is empty"),
        ("{", "--schema", "the JSON schema is not JSON"),
        ("answer = 3", "--grammar", "is neither a Lark nor a GBNF grammar"),
        ('start: "a', "--grammar", "the Lark grammar cannot be used"),
    ],
)
def test_a_bad_file_is_reported_before_a_model_is_pulled(content, flag, said, tmp_path, localllm, engine):
    file = tmp_path / "asked"
    file.write_text(content)
    code, out, err = localllm("run", "org/not-here", flag, str(file), "Which?")
    assert (code, out) == (2, "") and said in err
    assert engine.loaded == []


def test_an_engine_that_violates_the_schema_is_detected(localllm, model):
    """The fake engine ignores grammars, and repeats the question."""
    code, out, err = localllm("run", model, "--choice", "yes,no", "Which?")
    assert (code, out) == (5, "1:Which?")
    assert "error: the answer is none of 2 choices" in err
    assert localllm("run", model, "--choice", "yes,1:Which?", "Which?")[0] == 0


def test_a_conversation_takes_no_grammar(localllm, model, monkeypatch):
    monkeypatch.setattr("localllm.cli.io.is_interactive", lambda: True)
    code, _, err = localllm("run", model, "--choice", "a,b")
    assert code == 2 and "--choice needs a prompt" in err
