"""Print the functions of localllm that a command or a request calls, in the order of their first calls.

python -m tests.call_trace run|http
"""

import asyncio
import io
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch  # noqa: F401 - before calls are counted, as an import takes twice as long then

PACKAGE = f"{Path(__file__).parents[1] / 'localllm'}/"


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """Count the calls of all threads by file below localllm/ and qualified name."""
    calls: Counter[str] = Counter()

    def record(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls[f"{code.co_filename.removeprefix(PACKAGE)} {code.co_qualname}"] += 1

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def run_demo() -> Counter[str]:
    """`localllm run demo hi`."""
    sys.argv = ["localllm", "run", "demo", "hi", "--local", "--max-tokens", "4"]
    with counted_calls() as calls, redirect_stdout(io.TextIOWrapper(io.BytesIO())), suppress(SystemExit):
        from localllm.__main__ import main

        main()
    return calls


async def request_chat() -> Counter[str]:
    """A streamed chat completion of a loaded model, through the application that `serve` runs."""
    import httpx2

    import localllm
    from localllm.server.app import create_app
    from localllm.server.models import ModelPool

    models = ModelPool(localllm.load)
    body: dict[str, Any] = {"model": "demo", "stream": True, "max_tokens": 4}
    body["messages"] = [{"role": "user", "content": "hi"}]

    async def ask(client: httpx2.AsyncClient) -> None:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            assert len([line async for line in response.aiter_lines()]) > 4

    with counted_calls() as calls:  # from before the engine's thread starts, which would not be traced otherwise
        models.add_preloaded(localllm.load("demo"), "demo")
        transport = httpx2.ASGITransport(app=cast(Any, create_app(models)))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await ask(client)  # later requests find what the first has set up
            calls.clear()
            await ask(client)
    await models.close()
    return calls


if __name__ == "__main__":
    print(json.dumps(run_demo() if sys.argv[1] == "run" else asyncio.run(request_chat())))
