"""Which function computes an operation here: the first whose `when` accepts the call; a reference accepts all.

`explain(operation, ...)` tells which one and why the others were passed over: the choice is never a mystery.
`used()` tells which ones have run.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def always_supported(*_: Any) -> None:
    """Accepts every call."""


@dataclass(frozen=True, eq=False)  # a set of them asks for no more than which
class Kernel:
    operation: str
    name: str
    unsupported: Callable[..., str | None]  # the call's arguments -> None to accept, or the reason why not
    run: Callable[..., Any]


KERNELS: dict[str, list[Kernel]] = defaultdict(list)
_used: set[Kernel] = set()


def kernel(
    operation: str, name: str, unsupported: Callable[..., str | None] = always_supported, *, first: bool = False
) -> Callable[[F], F]:
    """Registers a function; those of one operation stand in one file, the fastest first, the reference last.

    first: before all that are registered already, for kernels that are loaded only where there is a GPU.
    """

    def register(run: F) -> F:
        KERNELS[operation].insert(
            0 if first else len(KERNELS[operation]), Kernel(operation, name, unsupported, run)
        )
        return run

    return register


def find(operation: str, *arguments: Any) -> Kernel:
    # A loop: a generator would take half as long again, some sixty times a step.
    for k in KERNELS[operation]:
        if k.unsupported is always_supported or k.unsupported(*arguments) is None:
            return k
    raise LookupError(f"no kernel for {operation}")


def choose(operation: str, *arguments: Any) -> Kernel:
    """`find`, for a call that follows."""
    found = find(operation, *arguments)
    _used.add(found)
    return found


def used_kernels() -> dict[str, tuple[str, ...]]:
    """The kernels that this process has called so far, by operation, in the order in which they are asked."""
    names = {name: tuple(k.name for k in kernels if k in _used) for name, kernels in sorted(KERNELS.items())}
    return {operation: found for operation, found in names.items() if found}


def dispatch(operation: str, *arguments: Any) -> Any:
    """Of operations that a CPU does often: where only the reference is registered it is called without a question,
    which would take 0.9 us (a norm of a row of 2,048 takes 5.7)."""
    kernels = KERNELS[operation]
    if len(kernels) > 1:
        return choose(operation, *arguments).run(*arguments)
    _used.add(kernels[0])
    return kernels[0].run(*arguments)


def explain(operation: str, *arguments: Any) -> list[tuple[str, str]]:
    """Every kernel's name with `ok` or its reason to decline; the first `ok` is the one that runs."""
    return [(k.name, k.unsupported(*arguments) or "ok") for k in KERNELS[operation]]
