"""`--quant`: quantizes a model to INT8 or INT4 the first time, and reuses the result later."""

from collections.abc import Callable
from pathlib import Path

from localllm.checkpoint.header import Header
from localllm.quantize.make import Progress, make_artefact
from localllm.quantize.source import INSTEAD, check_source
from localllm.quantize.store import artefact_lock, artefact_path, find_artefact, recipe_of


def find_or_quantize(
    header: Header,
    quant: str,
    home: Path,
    on_progress: Progress = lambda part, done, count: None,
    notify: Callable[[str], object] = lambda text: None,
) -> Path:
    """Return the folder of the quantized model. notify: receives a message for the user.

    Raises UsageError for a source that is already quantized, and like `make_artefact`; an interrupted run is
    resumed the next time.
    """
    recipe = recipe_of(quant)
    check_source(header, INSTEAD)
    folder = artefact_path(home, header.path, quant)
    with artefact_lock(folder, lambda: notify(f"another process is quantizing {header.path}; waiting for it")):
        if (existing := find_artefact(home, header.path, quant)) is not None:
            return existing
        make_artefact(header, recipe, folder, on_progress, force=True)
    return folder
