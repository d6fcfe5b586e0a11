"""Makes an edition of a model and gives it a name: the one way for `localllm create` and `POST /api/create`."""

from collections.abc import Callable
from dataclasses import replace

from localllm.checkpoint.header import read_header
from localllm.checkpoint.layouts import check_quantization
from localllm.errors import PromptRefused, UsageError
from localllm.hub.assign_name import assign_edition, durable_target, validate_name
from localllm.hub.local_names import find_edition
from localllm.hub.names import strip_latest
from localllm.hub.resolve import resolve_model
from localllm.hub.uploaded_blobs import link_model_folder, remove_unused_uploads
from localllm.modelfile.edition import CreateRequest, Edition
from localllm.quantize.source import INSTEAD, check_source
from localllm.quantize.store import RECIPES
from localllm.settings import Settings
from localllm.text.template import ChatTemplate

OnStatus = Callable[[str], object]


def create(plan: CreateRequest, on_status: OnStatus) -> None:
    """on_status: is told what is done next, in Ollama's words where it has some. What cannot run is refused
    before the
    name is given.

    Raises UsageError, ModelNotFound, UnsupportedModel, DamagedModel, DiskFull.
    """
    name = validate_name(plan.name)
    if plan.quant and plan.quant.lower() not in RECIPES:
        raise UsageError(f"quantize is {plan.quant[:40]!r}", f"name one of {', '.join(RECIPES)}")
    if not plan.files:
        finish_edition(name, resolve_source(plan.edition), plan.quant, on_status)
        return
    if plan.edition.source:
        raise UsageError("there are a model to start from and files", "send one of the two")
    on_status("parsing GGUF" if any(file.endswith(".gguf") for file in plan.files) else "parsing safetensors")
    folder = link_model_folder(plan.files)
    try:
        path = resolve_model(str(folder)).path.absolute()
        finish_edition(name, replace(plan.edition, source=str(path)), plan.quant, on_status)
    finally:
        remove_unused_uploads(str(folder))  # where it was refused, or quantized into another


def finish_edition(name: str, edition: Edition, quant: str, on_status: OnStatus) -> None:
    """Look whether it runs, quantize it where that is asked, and give it its name."""
    header = read_header(resolve_model(edition.source).path)
    check_quantization(header.config)
    if edition.template:
        check_template(edition.template)
    if quant:
        check_source(header, INSTEAD)
        on_status(f"quantizing to {quant.upper()}")
        from localllm.quantize.make import find_or_quantize

        home = Settings.from_environment().home
        edition = replace(edition, source=str(find_or_quantize(header, quant.lower(), home).absolute()))
    on_status("writing manifest")
    assign_edition(name, edition)
    on_status("success")


def resolve_source(edition: Edition) -> Edition:
    """Return the edition with its source resolved to a model, merged over the edition it was created from."""
    named = strip_latest(edition.source)
    if base := find_edition(named):
        return replace(edition.merged_over(base), parent=edition.parent or named)
    return replace(edition, source=durable_target(named), parent=edition.parent or named)


def check_template(source: str) -> None:
    """Raises UsageError, or DamagedModel, for what is no Jinja, or does not write what a user says."""
    template = ChatTemplate({"default": source})
    question = {"role": "user", "content": "What is a cat?"}
    try:
        template.check()
        if question["content"] not in template.render([question]).text:
            raise UsageError("the chat template leaves out what the user says", "write message.content into it")
    except PromptRefused:
        pass  # it may want more of a conversation than one question
    finally:
        template.close()
