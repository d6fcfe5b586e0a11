"""Parses and formats the text of a Modelfile. Independent of files and models.

FROM, PARAMETER, SYSTEM, TEMPLATE, MESSAGE and LICENSE, in upper or lower case, one per line; a value may be
enclosed in quotes, or in triple quotes over several lines. Source: Ollama's parser.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from localllm.errors import UsageError
from localllm.modelfile.edition import ROLES, Edition
from localllm.modelfile.options import BOOLEAN, INTEGER, NUMBER, OPTION_TYPES, STRINGS, check_options

QUOTES = '"""'
COMMANDS = ("FROM", "PARAMETER", "SYSTEM", "TEMPLATE", "MESSAGE", "LICENSE")


@dataclass(frozen=True)
class Line:
    number: int  # of its first row, from 1
    command: str  # in upper case
    value: str


def parse_modelfile(text: str) -> Edition:
    """Return the edition, whose `source` is the exact text after FROM. Raises UsageError with the line."""
    fields: dict[str, Any] = {"parameters": {}, "messages": [], "license": []}
    for line in parse_lines(text.removeprefix("\ufeff")):
        try:
            _apply(line, fields)
        except UsageError as error:
            raise UsageError(f"line {line.number} of the Modelfile: {error.message}", error.remedy) from None
    if "source" not in fields:
        raise UsageError("the Modelfile has no FROM", "specify the model: FROM demo")
    return Edition(**fields)


def parse_lines(text: str) -> Iterator[Line]:
    """Yield commands with their values, without quotes. Raises UsageError for unclosed quotes."""
    rows = text.splitlines(keepends=True)
    position = 0
    while position < len(rows):
        start, row = position, rows[position].strip()
        position += 1
        if not row or row.startswith("#"):
            continue
        command, _, value = row.partition(" ") if " " in row else row.partition("\t")
        value = value.strip()
        words = value.split(None, 1)
        if command.upper() in ("PARAMETER", "MESSAGE") and len(words) == 2:
            name, value = words
        else:
            name = ""
        quote = next((quote for quote in (QUOTES, '"') if value.startswith(quote)), "")
        if quote:
            value = rows[start][rows[start].index(value) :] if value in rows[start] else value
            ended = _ends(value, quote)
            if not ended:
                following = range(position, len(rows))
                position = 1 + next((i for i in following if rows[i].rstrip().endswith(quote)), len(rows))
                ended = position <= len(rows)
                value += "".join(rows[start + 1 : position])
            if not ended:
                raise UsageError(
                    f"line {start + 1} of the Modelfile: its quotes are not closed", f"add {quote} at the end"
                )
            value = value.strip()[len(quote) : -len(quote)]
        yield Line(start + 1, command.upper(), f"{name} {value}" if name else value)


def _ends(value: str, quote: str) -> bool:
    value = value.rstrip()
    return len(value) >= 2 * len(quote) and value.endswith(quote)


def _apply(line: Line, fields: dict[str, Any]) -> None:
    if line.command not in COMMANDS:
        raise UsageError(f"{line.command[:40]} is not supported", f"it may have {', '.join(COMMANDS)}")
    if not line.value:
        raise UsageError(f"{line.command} has no value", "write its value after it")
    match line.command:
        case "FROM":
            if "source" in fields:
                raise UsageError("it has a second FROM", "leave one of them out")
            fields["source"] = line.value
        case "PARAMETER":
            name, _, text = line.value.partition(" ")
            values = fields["parameters"]
            check_options(value := {name: parse_value(name, text)})
            values[name] = [*values.get(name, []), *value[name]] if name == "stop" else value[name]
        case "MESSAGE":
            role, _, text = line.value.partition(" ")
            if role.lower() not in ROLES or not text:
                raise UsageError(f"MESSAGE {role[:40]} is invalid", f"write one of {', '.join(ROLES)} and a text")
            fields["messages"].append({"role": role.lower(), "content": text})
        case "LICENSE":
            fields["license"].append(line.value)
        case command:
            fields[command.lower()] = line.value


def parse_value(name: str, text: str) -> Any:
    """Parse a parameter's value. Raises UsageError if it has another type."""
    try:
        match OPTION_TYPES.get(name):
            case kind if kind == INTEGER:
                return int(text)
            case kind if kind == NUMBER:
                return float(text)
            case kind if kind == BOOLEAN and text.lower() in ("true", "false"):
                return text.lower() == "true"
            case kind if kind == STRINGS:
                return [text]
            case None:
                return text  # `check_options` reports that there is no such option
    except ValueError:
        pass
    raise UsageError(f"{name} is {text[:40]!r}", f"write a value of type {OPTION_TYPES[name]}")


def format_modelfile(edition: Edition, source: str) -> str:
    """Return a Modelfile that creates the edition from `source`."""
    rows = [f"FROM {source}"]
    rows += [f"TEMPLATE {_quoted(edition.template)}"] if edition.template else []
    rows += [f"SYSTEM {_quoted(edition.system)}"] if edition.system else []
    rows += [f"PARAMETER {row}" for row in format_parameters(edition.parameters)]
    rows += [f"MESSAGE {message['role']} {_quoted(message['content'])}" for message in edition.messages]
    rows += [f"LICENSE {_quoted(text)}" for text in edition.license]
    return "\n".join(rows) + "\n"


def format_parameters(parameters: Any) -> list[str]:
    """Return rows such as `temperature 0.5`, one per value, with strings in quotes."""
    rows: list[str] = []
    for name, value in parameters.items():
        for item in value if isinstance(value, list) else [value]:
            text = f'"{item}"' if isinstance(item, str) else str(item).lower()
            rows.append(f"{name} {text}")
    return rows


def _quoted(text: str) -> str:
    return f"{QUOTES}{text}{QUOTES}"
