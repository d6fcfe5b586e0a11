"""Names that clients send, and what to tell of those that nobody knows. Knows nothing of what is loaded."""

from collections.abc import Mapping

from localllm.errors import ModelNotFound
from localllm.hub.made import edition_of
from localllm.hub.names import ALIAS, is_path, known_as, near_names, parse
from localllm.hub.resolve import resolve

PATHS = ("/", "./", "../", "~")


def source_of(name: str, given: Mapping[str, str]) -> str:
    """What a name that a client sent stands for. given: names of the server's own, each with what it stands for.

    Raises ModelNotFound for what is not on this machine: paths are for whoever starts the server, and nothing is
    pulled unasked.
    """
    if name in given:
        return given[name]
    name = known_as(name)
    if edition := edition_of(name):
        return edition.source
    if name.startswith(PATHS):  # `parse` would advise to give one
        raise ModelNotFound(f"{name!r} is a path", "ask for one of the names that the server lists")
    check_known(name)
    resolve(name, paths=False)  # says the same whether or not there is a file of that name
    if is_path(name):
        raise ModelNotFound(f"{name!r} is a path, too", "ask for one of those that the server lists")
    return name


def check_known(name: str) -> None:
    """Raises ModelNotFound where the name stands for nothing, here or elsewhere."""
    try:
        parse(name, paths=False)
    except ModelNotFound as error:
        near = near_names(name) if ALIAS.fullmatch(name) else []  # a long one takes its time
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        raise ModelNotFound(error.message, f"{guess}GET /v1/models lists the names") from error
