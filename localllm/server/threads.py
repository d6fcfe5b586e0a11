"""Work in a thread that the end of the process does not wait for, as it may take minutes."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def run_in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As `asyncio.to_thread`, whose threads are waited for at the end. Raises what the function raises."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, fault = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            fault = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, fault)

    threading.Thread(target=work, name=f"localllm-{getattr(function, '__name__', 'work')}", daemon=True).start()
    return await done
