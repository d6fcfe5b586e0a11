"""Makes an edition of a model and gives it a name: the one way for `localllm create` and `POST /api/create`."""

from collections.abc import Callable
from dataclasses import replace

from localllm.checkpoint.header import read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.errors import UsageError
from localllm.hub.blobs import drop_unused, folder_of
from localllm.hub.made import edition_of
from localllm.hub.names import known_as
from localllm.hub.naming import check_name, lasting, make
from localllm.hub.resolve import resolve
from localllm.modelfile.edition import Edition
from localllm.modelfile.plan import Plan
from localllm.quantize.source import INSTEAD, check_source
from localllm.quantize.store import RECIPES
from localllm.settings import Settings
from localllm.text.template import ChatTemplate

Say = Callable[[str], object]


def create(plan: Plan, say: Say) -> None:
    """say: is told what is done next, in Ollama's words where it has some. What cannot run is refused before the
    name is given.

    Raises UsageError, ModelNotFound, UnsupportedModel, DamagedModel, DiskFull.
    """
    name = check_name(plan.name)
    if plan.quant and plan.quant.lower() not in RECIPES:
        raise UsageError(f"quantize is {plan.quant[:40]!r}", f"name one of {', '.join(RECIPES)}")
    if not plan.files:
        finish(name, from_model(plan.edition), plan.quant, say)
        return
    if plan.edition.source:
        raise UsageError("there are a model to start from and files", "send one of the two")
    say("parsing GGUF" if any(file.endswith(".gguf") for file in plan.files) else "parsing safetensors")
    folder = folder_of(plan.files)
    try:
        path = resolve(str(folder)).path.absolute()
        finish(name, replace(plan.edition, source=str(path)), plan.quant, say)
    finally:
        drop_unused(str(folder))  # where it was refused, or quantized into another


def finish(name: str, edition: Edition, quant: str, say: Say) -> None:
    """Look whether it runs, quantize it where that is asked, and give it its name."""
    header = read_header(resolve(edition.source).path)
    check_quantization(header.config)
    if edition.template:
        check_template(edition.template)
    if quant:
        check_source(header, INSTEAD)
        say(f"quantizing to {quant.upper()}")
        from localllm.quantize.keep import kept_or_made  # with torch

        home = Settings.from_environment().home
        edition = replace(edition, source=str(kept_or_made(header, quant.lower(), home).absolute()))
    say("writing manifest")
    make(name, edition)
    say("success")


def from_model(edition: Edition) -> Edition:
    """On top of the model, or of the edition, that its source names."""
    named = known_as(edition.source)
    if base := edition_of(named):
        return replace(edition.over(base), parent=edition.parent or named)
    return replace(edition, source=lasting(named), parent=edition.parent or named)


def check_template(source: str) -> None:
    """Raises UsageError for what is no Jinja."""
    template = ChatTemplate({"default": source})
    try:
        template.check()
    finally:
        template.close()
