"""Names that clients send, and what to tell of those that nobody knows. Knows nothing of what is loaded."""

from localllm.errors import ModelNotFound
from localllm.hub.names import ALIAS, near_names, parse


def check_known(name: str) -> None:
    """Raises ModelNotFound where the name stands for nothing, here or elsewhere."""
    try:
        parse(name, paths=False)
    except ModelNotFound as error:
        near = near_names(name) if ALIAS.fullmatch(name) else []  # a long one takes its time
        guess = f"did you mean {' or '.join(near)}? " if near else ""
        raise ModelNotFound(error.message, f"{guess}GET /v1/models lists the names") from error
