"""What ends the program from outside: it puts away what it holds, then dies of the signal, as shells expect.

One that exits with 130 instead lets a loop of bash or xargs go on to the next round. Shells show 128 plus the
number: 130 for Ctrl-C, 143 for SIGTERM, 129 for a terminal that is gone.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

ENDING = (signal.SIGTERM, signal.SIGHUP)  # Python itself raises KeyboardInterrupt for SIGINT


class Ended(SystemExit):
    """Raised in the main thread, so that streams are closed, the cursor is shown and the server is told."""

    def __init__(self, number: int):
        super().__init__(128 + number)
        self.number = number


@contextmanager
def raised() -> Iterator[None]:
    """SIGTERM and SIGHUP raise Ended meanwhile; a second one kills. What is ignored, as by nohup, stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler is signal.SIG_DFL:
            signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    raise Ended(number)


def die(number: int) -> NoReturn:
    """Of the signal, at once: the engine's thread may be inside a kernel, and an interpreter that ends around it
    aborts with a message. Everything that was said has been flushed."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    os._exit(128 + number)
