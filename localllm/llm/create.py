"""Creates an edition of a model under a name, for `localllm create` and `POST /api/create`."""

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


def create(request: CreateRequest, on_status: OnStatus) -> None:
    """Create an edition after checking that it can be loaded.

    on_status: called with each step, in Ollama's words where it has the step. Raises UsageError, ModelNotFound,
    UnsupportedModel, DamagedModel, DiskFull.
    """
    name = validate_name(request.name)
    if request.quant and request.quant.lower() not in RECIPES:
        raise UsageError(f"quantize is {request.quant[:40]!r}", f"use one of {', '.join(RECIPES)}")
    if not request.files:
        finish_edition(name, resolve_source(request.edition), request.quant, on_status)
        return
    if request.edition.source:
        raise UsageError("the request has both a base model and files", "send one of the two")
    on_status("parsing GGUF" if any(file.endswith(".gguf") for file in request.files) else "parsing safetensors")
    folder = link_model_folder(request.files)
    try:
        path = resolve_model(str(folder)).path.absolute()
        finish_edition(name, replace(request.edition, source=str(path)), request.quant, on_status)
    finally:
        remove_unused_uploads(str(folder))  # if it was refused, or quantized into another folder


def finish_edition(name: str, edition: Edition, quant: str, on_status: OnStatus) -> None:
    """Check that the edition's model is supported, quantize it if requested, and assign the name."""
    header = read_header(resolve_model(edition.source).path)
    check_quantization(header.config)
    if edition.template:
        check_template(edition.template)
    if quant:
        check_source(header, INSTEAD)
        on_status(f"quantizing to {quant.upper()}")
        from localllm.quantize.quantizer import find_or_quantize

        home = Settings.from_environment().home
        edition = replace(edition, source=str(find_or_quantize(header, quant.lower(), home).absolute()))
    on_status("writing manifest")
    assign_edition(name, edition)
    on_status("success")


def resolve_source(edition: Edition) -> Edition:
    """Return the edition with its source resolved to a model, merged over the edition it is based on, if any."""
    base_name = strip_latest(edition.source)
    if base := find_edition(base_name):
        return replace(edition.merged_over(base), parent=edition.parent or base_name)
    return replace(edition, source=durable_target(base_name), parent=edition.parent or base_name)


def check_template(source: str) -> None:
    """Raise DamagedModel for invalid Jinja, UsageError for a template that omits the user's message."""
    template = ChatTemplate({"default": source})
    question = {"role": "user", "content": "What is a cat?"}
    try:
        template.check()
        if question["content"] not in template.render([question]).text:
            raise UsageError("the chat template omits the user's message", "write message.content into it")
    except PromptRefused:
        pass  # it may require more than one message
    finally:
        template.close()
