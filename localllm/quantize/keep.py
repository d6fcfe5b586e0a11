"""`--quant`: a model rounded to INT8 or INT4 the first time, and found again every later one."""

from collections.abc import Callable
from pathlib import Path

from localllm.checkpoint.header import Header
from localllm.quantize.make import Progress, make
from localllm.quantize.source import INSTEAD, check_source
from localllm.quantize.store import find, locked, place, recipe_of


def kept_or_made(
    header: Header,
    quant: str,
    home: Path,
    on_progress: Progress = lambda part, done, count: None,
    say: Callable[[str], object] = lambda text: None,
) -> Path:
    """The folder of the quantized model. say: takes a line for the person.

    Raises UsageError for a source that is quantized already, and what `make` raises; a run that is broken off goes
    on the next time.
    """
    recipe = recipe_of(quant)
    check_source(header, INSTEAD)
    folder = place(home, header.path, quant)
    with locked(folder, lambda: say(f"another process is quantizing {header.path}, waiting for that one")):
        if (found := find(home, header.path, quant)) is not None:
            return found
        make(header, recipe, folder, on_progress, force=True)
    return folder
