"""`localllm create`: a Modelfile becomes a name that every command takes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.io import StdoutWriter, note
from localllm.errors import UsageError
from localllm.files import expand_path
from localllm.hub.local_names import find_edition
from localllm.hub.names import is_path, strip_latest
from localllm.modelfile.edition import TEXT_LIMIT, CreateRequest, to_json
from localllm.modelfile.parse import parse_modelfile

ModelfilePath = Annotated[
    str, typer.Option("-f", "--file", help="Modelfile to read.", metavar="FILE", show_default="Modelfile")
]

Quant = Annotated[
    str | None, options.option("--quant", text="Quantize the weights to int8 or int4 first.", metavar="QUANT")
]


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", hidden=True)],
    file: ModelfilePath = "Modelfile",
    quant: Quant = None,
    as_json: options.Json = False,
) -> None:
    """Create a model from a Modelfile.

    NAME is then accepted by every other command and by clients of a server. The weights are not copied. The file
    is a Modelfile as in Ollama: FROM, PARAMETER, SYSTEM, TEMPLATE (in Jinja), MESSAGE and LICENSE. `localllm show
    NAME` shows it, `localllm rm NAME` removes the name.
    """
    from localllm.llm.create import create as make

    out = StdoutWriter()
    path = Path(file)
    edition = parse_modelfile(read_modelfile(path))
    if is_path(edition.source) and not expand_path(edition.source).is_absolute():
        edition = replace(edition, source=str(path.parent / edition.source))
    make(CreateRequest(name, edition, quant=quant or ""), note)
    out.write(_edition_json(name) if as_json else f"{name}\n")


def _edition_json(name: str) -> str:
    """What has become of it: a model that is an edition itself lends its words."""
    edition = find_edition(strip_latest(name))
    assert edition
    return json.dumps({"name": name, "edition": to_json(edition)}) + "\n"


def read_modelfile(file: Path) -> str:
    """Raises UsageError for what is no file of text."""
    try:
        if file.stat().st_size > TEXT_LIMIT:
            raise UsageError(f"{file} is larger than any Modelfile", "name another file with -f")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise UsageError(f"{file} cannot be read ({why})", "name a Modelfile with -f") from None
