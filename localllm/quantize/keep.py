"""`--quant`: a model rounded to INT8 or INT4 the first time, and found again every later one."""

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
    """The folder of the quantized model. notify: takes a line for the person.

    Raises UsageError for a source that is quantized already, and what `make` raises; a run that is broken off goes
    on the next time.
    """
    recipe = recipe_of(quant)
    check_source(header, INSTEAD)
    folder = artefact_path(home, header.path, quant)
    with artefact_lock(
        folder, lambda: notify(f"another process is quantizing {header.path}, waiting for that one")
    ):
        if (found := find_artefact(home, header.path, quant)) is not None:
            return found
        make_artefact(header, recipe, folder, on_progress, force=True)
    return folder
