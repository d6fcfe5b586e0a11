"""Modelfiles are parsed, and written so that they parse to the same."""

import pytest

from localllm.errors import UsageError
from localllm.modelfile.edition import Edition, from_json, to_json
from localllm.modelfile.parse import format_modelfile, parse_modelfile

TEXT = '''
# a cat
from demo
PARAMETER temperature 0.5
parameter stop "<|a b|>"
PARAMETER stop x
PARAMETER num_ctx 4096
PARAMETER use_mmap true
System """
You are a cat.
  # no comment
"""
TEMPLATE "{{ messages }}"
MESSAGE user Who?
MESSAGE assistant """I,
the cat."""
LICENSE MIT
LICENSE """more
of it"""
'''


def test_every_command_is_read() -> None:
    assert parse_modelfile(TEXT) == Edition(
        source="demo",
        system="\nYou are a cat.\n  # no comment\n",
        template="{{ messages }}",
        parameters={"temperature": 0.5, "stop": ["<|a b|>", "x"], "num_ctx": 4096, "use_mmap": True},
        messages=({"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I,\nthe cat."}),
        license=("MIT", "more\nof it"),
    )


def test_a_written_modelfile_is_read_again() -> None:
    edition = parse_modelfile(TEXT)
    assert parse_modelfile(format_modelfile(edition, "demo")) == edition
    assert from_json(to_json(edition)) == edition


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no FROM"),
        ("FROM a\nADAPTER x", "line 2 of the Modelfile: ADAPTER is not supported"),
        ("FROM a\n\nNONSENSE", "line 3 of the Modelfile: NONSENSE"),
        ("FROM a\nFROM b", "line 2 .* second FROM"),
        ("FROM a\nSYSTEM", "line 2 .* has no value"),
        ('FROM a\nSYSTEM """x\ny', "line 2 .* quotes are not closed"),
        ("FROM a\nPARAMETER temperature hot", "line 2 .*temperature is 'hot'"),
        ("FROM a\nPARAMETER heat 3", 'line 2 .*no option "heat"'),
        ("FROM a\nPARAMETER mirostat 2", "line 2 .*mirostat"),
        ("FROM a\nPARAMETER top_p 3", "line 2 .*top_p is 3"),
        ("FROM a\nMESSAGE cat hi", "line 2 .*MESSAGE cat"),
        ("FROM a\nTEMPLATE {{ .Prompt }}", "in Go's syntax"),
        ("FROM a\nTEMPLATE {{- if .System }}x{{ end }}", "in Go's syntax"),
    ],
)
def test_an_invalid_line_is_reported_with_its_number(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_modelfile(text)


def test_jinja_is_not_mistaken_for_go_templates() -> None:
    source = "{%- for m in messages -%}{{- m.content -}}{{ eos_token if loop.last }}{%- endfor -%}{{ not_go }}"
    assert parse_modelfile(f"FROM a\nTEMPLATE {source}").template == source


def test_a_system_prompt_of_the_conversation_stands_before_that_of_the_edition() -> None:
    shots = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    edition = Edition("demo", system="cat", messages=shots)
    hi = {"role": "user", "content": "hi"}
    dog = {"role": "system", "content": "dog"}
    assert edition.prepend_to([hi]) == [{"role": "system", "content": "cat"}, *shots, hi]
    assert edition.prepend_to([dog, hi]) == [dog, *shots, hi]


def test_parsing_is_linear_in_lines() -> None:
    text = "a\n" * 400_000
    assert parse_modelfile(f'FROM demo\nLICENSE """{text}"""\nSYSTEM x').license == (text,)
