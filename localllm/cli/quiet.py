"""`--quiet`, for every command alike: stderr gets errors and nothing else."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

from localllm.cli import options
from localllm.cli.io import silence_stderr

Quiet = Annotated[bool, options.switch("--quiet", text="Nothing on stderr but errors.")]


def with_quiet_flag(command: Callable[..., None]) -> Callable[..., None]:
    """The command with a flag more."""

    @wraps(command)
    def run(*arguments: Any, quiet: bool = False, **flags: Any) -> None:
        with silence_stderr(flags | {"quiet": quiet}):
            command(*arguments, **flags)

    hints = get_type_hints(command, include_extras=True)
    signature = inspect.signature(command)
    flag = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), flag])  # type: ignore[attr-defined]
    run.__annotations__ = hints | {"quiet": Quiet}
    return run
