import atexit
import os

WORKERS = set[int]()  # of pytest-xdist: their process ids, but not those of their children


@atexit.register  # the first of nearly all, so that it is called after them
def end_at_once() -> None:
    """End a worker without freeing millions of objects one by one, which takes three seconds."""
    if os.getpid() in WORKERS:
        os._exit(0)
