"""`localllm create`: a Modelfile becomes a name that every command takes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.io import AnswerWriter, note
from localllm.errors import UsageError
from localllm.hub.made import edition_of
from localllm.hub.names import is_path, known_as
from localllm.modelfile.edition import TEXT_LIMIT, to_json
from localllm.modelfile.parse import parse
from localllm.modelfile.plan import Plan
from localllm.paths import expanded

File = Annotated[
    str, typer.Option("-f", "--file", help="What it is made of.", metavar="FILE", show_default="Modelfile")
]

Quant = Annotated[
    str | None, options.option("--quant", text="Quantize the weights to int8 or int4 first.", metavar="QUANT")
]


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", hidden=True)],
    file: File = "Modelfile",
    quant: Quant = None,
    as_json: options.Json = False,
) -> None:
    """Make an edition of a model: with a system prompt, parameters or a template of its own.

    NAME is what every other command takes from then on, and what clients of a server ask for. The weights are not
    copied. The file is a Modelfile, as Ollama has it: FROM, PARAMETER, SYSTEM, TEMPLATE (in Jinja), MESSAGE and
    LICENSE. `localllm show NAME` shows it, `localllm rm NAME` takes the name away.
    """
    from localllm.making import create as make

    out = AnswerWriter()
    path = Path(file)
    edition = parse(text_of(path))
    if is_path(edition.source) and not expanded(edition.source).is_absolute():
        edition = replace(edition, source=str(path.parent / edition.source))
    make(Plan(name, edition, quant=quant or ""), note)
    out.write(_as_json(name) if as_json else f"{name}\n")


def _as_json(name: str) -> str:
    """What has become of it: a model that is an edition itself lends its words."""
    edition = edition_of(known_as(name))
    assert edition
    return json.dumps({"name": name, "edition": to_json(edition)}) + "\n"


def text_of(file: Path) -> str:
    """Raises UsageError for what is no file of text."""
    try:
        if file.stat().st_size > TEXT_LIMIT:
            raise UsageError(f"{file} is larger than any Modelfile", "name another file with -f")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise UsageError(f"{file} cannot be read ({why})", "name a Modelfile with -f") from None
