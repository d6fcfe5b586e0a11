"""Names that clients send, and what to tell of those that nobody knows. Knows nothing of what is loaded."""

from collections.abc import Mapping
from dataclasses import replace

from localllm.errors import ModelNotFound
from localllm.hub.made import find_edition
from localllm.hub.names import ALIAS_NAME, is_path, parse_name, similar_names, strip_latest
from localllm.hub.resolve import ModelRef, resolve_model

PATH_PREFIXES = ("/", "./", "../", "~")


def resolve_client_name(name: str, given: Mapping[str, str]) -> ModelRef:
    """The model that a client means. given: names of the server's own, each with what it stands for.

    Raises ModelNotFound for what is not on this machine: paths are for whoever starts the server, and nothing is
    pulled unasked.
    """
    if name in given:
        return replace(resolve_model(given[name]), edition=None)
    name = strip_latest(name)
    if edition := find_edition(name):
        return replace(resolve_model(edition.source), edition=edition)
    if name.startswith(PATH_PREFIXES):  # `parse` would advise to give one
        raise ModelNotFound(f"{name!r} is a path", "ask for one of the names that the server lists")
    check_name_exists(name)
    ref = resolve_model(name, paths=False)  # the same whether or not there is a file of that name
    if is_path(name):
        raise ModelNotFound(f"{name!r} is a path, too", "ask for one of those that the server lists")
    return ref


def check_name_exists(name: str) -> None:
    """Raises ModelNotFound where the name stands for nothing, here or elsewhere."""
    try:
        parse_name(name, paths=False)
    except ModelNotFound as error:
        near = similar_names(name) if ALIAS_NAME.fullmatch(name) else []  # a long one takes its time
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        raise ModelNotFound(error.message, f"{guess}GET /v1/models lists the names") from error
