"""The text of a Modelfile to what it says, and back. Knows no file and no model.

FROM, PARAMETER, SYSTEM, TEMPLATE, MESSAGE and LICENSE, in any case, one a line; a value may stand between quotes,
or between three, over several lines. Source: Ollama's parser.
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
    number: int  # where it begins, from 1
    command: str  # in capitals
    value: str


def parse_modelfile(text: str) -> Edition:
    """Its `source` is what stands behind FROM, word for word. Raises UsageError that names the line."""
    found: dict[str, Any] = {"parameters": {}, "messages": [], "license": []}
    for line in parse_lines(text.removeprefix("\ufeff")):
        try:
            _apply(line, found)
        except UsageError as error:
            raise UsageError(f"line {line.number} of the Modelfile: {error.message}", error.remedy) from None
    if "source" not in found:
        raise UsageError("the Modelfile has no FROM", "name the model: FROM demo")
    return Edition(**found)


def parse_lines(text: str) -> Iterator[Line]:
    """Commands with their values, quotes taken off. Raises UsageError where quotes do not end."""
    rows = text.splitlines(keepends=True)
    place = 0
    while place < len(rows):
        begin, row = place, rows[place].strip()
        place += 1
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
            value = rows[begin][rows[begin].index(value) :] if value in rows[begin] else value
            ended = _ends(value, quote)
            if not ended:
                behind = range(place, len(rows))
                place = 1 + next((at for at in behind if rows[at].rstrip().endswith(quote)), len(rows))
                ended = place <= len(rows)
                value += "".join(rows[begin + 1 : place])
            if not ended:
                raise UsageError(
                    f"line {begin + 1} of the Modelfile: its quotes do not end", f"write {quote} behind"
                )
            value = value.strip()[len(quote) : -len(quote)]
        yield Line(begin + 1, command.upper(), f"{name} {value}" if name else value)


def _ends(value: str, quote: str) -> bool:
    value = value.rstrip()
    return len(value) >= 2 * len(quote) and value.endswith(quote)


def _apply(line: Line, found: dict[str, Any]) -> None:
    if line.command not in COMMANDS:
        raise UsageError(f"{line.command[:40]} is not supported", f"it may have {', '.join(COMMANDS)}")
    if not line.value:
        raise UsageError(f"{line.command} says nothing", "write its value behind it")
    match line.command:
        case "FROM":
            if "source" in found:
                raise UsageError("it has a second FROM", "leave one of them out")
            found["source"] = line.value
        case "PARAMETER":
            name, _, text = line.value.partition(" ")
            values = found["parameters"]
            check_options(value := {name: parse_value(name, text)})
            values[name] = [*values.get(name, []), *value[name]] if name == "stop" else value[name]
        case "MESSAGE":
            role, _, text = line.value.partition(" ")
            if role.lower() not in ROLES or not text:
                raise UsageError(f"MESSAGE {role[:40]} is none", f"write one of {', '.join(ROLES)} and a text")
            found["messages"].append({"role": role.lower(), "content": text})
        case "LICENSE":
            found["license"].append(line.value)
        case command:
            found[command.lower()] = line.value


def parse_value(name: str, text: str) -> Any:
    """A parameter's value from its text. Raises UsageError where it is of another type."""
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
                return text  # `checked` says that there is no such option
    except ValueError:
        pass
    raise UsageError(f"{name} is {text[:40]!r}", f"write a value of type {OPTION_TYPES[name]}")


def format_modelfile(edition: Edition, source: str) -> str:
    """A Modelfile that makes the edition from `source`."""
    rows = [f"FROM {source}"]
    rows += [f"TEMPLATE {_quoted(edition.template)}"] if edition.template else []
    rows += [f"SYSTEM {_quoted(edition.system)}"] if edition.system else []
    rows += [f"PARAMETER {row}" for row in format_parameters(edition.parameters)]
    rows += [f"MESSAGE {message['role']} {_quoted(message['content'])}" for message in edition.messages]
    rows += [f"LICENSE {_quoted(text)}" for text in edition.license]
    return "\n".join(rows) + "\n"


def format_parameters(parameters: Any) -> list[str]:
    """`temperature 0.5`, a row a value, texts between quotes."""
    rows: list[str] = []
    for name, value in parameters.items():
        for one in value if isinstance(value, list) else [value]:
            text = f'"{one}"' if isinstance(one, str) else str(one).lower()
            rows.append(f"{name} {text}")
    return rows


def _quoted(text: str) -> str:
    return f"{QUOTES}{text}{QUOTES}"
