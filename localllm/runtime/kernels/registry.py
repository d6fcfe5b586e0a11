"""Which function computes an operation here: the first whose `when` accepts the call; a reference accepts all.

`explain(operation, ...)` tells which one and why the others were passed over: the choice is never a mystery.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def always(*_: Any) -> None:
    """Accepts every call."""


@dataclass(frozen=True)
class Kernel:
    operation: str
    name: str
    when: Callable[..., str | None]  # the call's arguments -> None to accept, or the reason why not
    run: Callable[..., Any]


KERNELS: dict[str, list[Kernel]] = defaultdict(list)


def kernel(
    operation: str, name: str, when: Callable[..., str | None] = always, *, first: bool = False
) -> Callable[[F], F]:
    """Registers a function; those of one operation stand in one file, the fastest first, the reference last.

    first: before all that are registered already, for kernels that are loaded only where there is a GPU.
    """

    def register(run: F) -> F:
        KERNELS[operation].insert(0 if first else len(KERNELS[operation]), Kernel(operation, name, when, run))
        return run

    return register


def choose(operation: str, *arguments: Any) -> Kernel:
    return next(k for k in KERNELS[operation] if k.when(*arguments) is None)


def run(operation: str, *arguments: Any) -> Any:
    """Of operations that a CPU does often: where only the reference is registered it is called without a question,
    which would take 0.9 us (a norm of a row of 2,048 takes 5.7)."""
    kernels = KERNELS[operation]
    return (kernels[0] if len(kernels) == 1 else choose(operation, *arguments)).run(*arguments)


def explain(operation: str, *arguments: Any) -> list[tuple[str, str]]:
    """Every kernel's name with `ok` or its reason to decline; the first `ok` is the one that runs."""
    return [(k.name, k.when(*arguments) or "ok") for k in KERNELS[operation]]
