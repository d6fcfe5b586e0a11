"""The page at `/simulate` and its routes: simulations run in processes of their own, a few at a time.

A simulation is a loop in Python, which in this process would hold up the engine and every answer.
"""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from localllm.api.body import validate
from localllm.api.events import error_from_json, error_to_json
from localllm.checkpoint.published import CONFIGS
from localllm.errors import BadField, Busy, LocalLLMError, ModelNotFound, UsageError
from localllm.hub.names import is_path
from localllm.hub.resolve import installed_models
from localllm.server.inventory import PATH_PREFIXES
from localllm.server.routing import JsonObject, RouteDocs, Router, read_json_body
from localllm.server.streaming import NDJSON, StreamResponse, ndjson_line

PROGRAM = (sys.executable, "-P", "-m", "localllm.cli.simulation_process")
MAX_PROCESSES = 2
SLOT_TIMEOUT_S = 3.0  # how long a request waits for another simulation to end
RUN_LIMIT_S = 60.0
CANCEL_LIMIT_S = 1.0  # for a process to notice; later it is killed
IDLE_LIMIT_S = 300.0  # after which a process ends, which has some hundred megabytes
MAX_LINE_BYTES = 64 * 2**20
MAX_OPTIONS = 64
MAX_OPTION_CHARACTERS = 200

EXAMPLE: Mapping[str, Any] = {
    "model": "llama3.1:8b-bf16",
    "options": {"--device": "H100 SXM", "--rate": 10, "--requests": 200},
}


class SimulationBody(BaseModel):
    """A simulation: a model, and options of `localllm simulate` by their flags."""

    model_config = ConfigDict(extra="forbid")

    model: str
    options: dict[str, str | bool | int | float] = Field(default_factory=dict, max_length=MAX_OPTIONS)


def router(simulations: "SimulationPool", *, has_chat: bool = True) -> Router:
    """has_chat: whether the server has the chat page too, for a link."""
    routes = Router("/simulate")

    @routes.get("/options")
    async def simulation_options(_: Request) -> JsonObject:
        """Options and presets of the page, and names of models."""
        models = await asyncio.to_thread(simulations.model_names)
        return {"models": models, "has_chat": has_chat, **await simulations.describe()}

    @routes.post("/run", RouteDocs(SimulationBody, EXAMPLE, media_type=NDJSON))
    async def run_simulation(request: Request) -> Response:
        """Simulate a load as `localllm simulate` does: JSON lines with the engine, its state as time passes, and
        the report. Ends when the client disconnects."""
        body = validate(SimulationBody, await read_json_body(request))
        for flag, value in body.options.items():
            if len(flag) + len(str(value)) > MAX_OPTION_CHARACTERS:
                raise BadField("options", "an option is too long", "send shorter ones")
        source = simulations.source_of(body.model)
        run = {"run": {"model": body.model, "source": source, "options": body.options}}
        return StreamResponse(simulations.lines(run), nullcontext(), NDJSON)

    return routes


class SimulationPool:
    """Processes that simulate, started on demand, and ended when they have been idle."""

    def __init__(self, aliases: Mapping[str, str]):
        """aliases: names with the name or path that each stands for; clients may use no other paths."""
        self.aliases = aliases
        self.idle: list[SimulationProcess] = []
        self.slots = asyncio.Semaphore(MAX_PROCESSES)
        self.tasks: set[asyncio.Task[None]] = set()
        self.description: JsonObject | None = None

    def model_names(self) -> list[str]:
        """Return names for the page to offer: what is installed, and models whose shapes come with the program."""
        installed = [ref.name for ref in installed_models()]
        return list(dict.fromkeys((*self.aliases, *installed, *CONFIGS)))

    def source_of(self, name: str) -> str:
        """Return the name or path of the model that a client's name refers to. Raises ModelNotFound for a path."""
        if name in self.aliases:
            return self.aliases[name]
        if name.startswith(PATH_PREFIXES) or is_path(name):
            raise ModelNotFound(f"{name!r} is a path", "use a name of the catalogue, or of this server's models")
        return name

    async def describe(self) -> JsonObject:
        """Return options and presets, which the command itself describes."""
        if self.description is None:
            async with self.process() as process:
                [line] = [line async for line in process.answer({"describe": True})]
                self.description = {name: value for name, value in line.items() if name != "end"}
        return self.description

    async def lines(self, request: JsonObject) -> AsyncGenerator[bytes]:
        """Yield the lines of a simulation. Raises its error if it comes first, and Busy if too many others run."""
        started = False
        async with self.process() as process, aclosing(process.answer(request)) as answer:
            try:
                async with asyncio.timeout(RUN_LIMIT_S):
                    async for line in answer:
                        if "error" in line and not started:
                            raise error_from_json(line)
                        started = True
                        yield ndjson_line({name: value for name, value in line.items() if name != "end"})
            except TimeoutError:
                message = f"the simulation takes longer than {RUN_LIMIT_S:.0f} s"
                error = UsageError(message, "choose fewer requests, or `localllm simulate`, which has no limit")
                if not started:
                    raise error from None
                yield ndjson_line(error_to_json(error))

    @asynccontextmanager
    async def process(self) -> AsyncIterator["SimulationProcess"]:
        """Lend a process. One that is in the middle of an answer when it is given back is made to end it."""
        try:
            async with asyncio.timeout(SLOT_TIMEOUT_S):
                await self.slots.acquire()
        except TimeoutError:
            raise Busy(f"{MAX_PROCESSES} simulations are running", retry_after=2) from None
        process = None
        try:
            process = self.idle.pop() if self.idle else await SimulationProcess.start()
            process.keep()
            yield process
        finally:
            task = asyncio.create_task(self.take_back(process))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def take_back(self, process: "SimulationProcess | None") -> None:
        try:
            if process and await process.cancel():
                self.idle.append(process)
                process.end_when_idle(self.idle)
        finally:
            self.slots.release()

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*self.tasks, return_exceptions=True)
        while self.idle:
            await self.idle.pop().end()


class SimulationProcess:
    """A process of `localllm.cli.simulation_process`."""

    def __init__(self, process: Process):
        self.process = process
        self.is_answering = False
        self.timer: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls) -> "SimulationProcess":
        """Raises LocalLLMError if it cannot be started."""
        try:  # its own process group receives no Ctrl-C
            process = await asyncio.create_subprocess_exec(
                *PROGRAM, stdin=PIPE, stdout=PIPE, limit=MAX_LINE_BYTES, process_group=0
            )
        except OSError as error:
            raise LocalLLMError(f"the process for simulations cannot be started: {error}") from error
        return cls(process)

    async def answer(self, request: JsonObject) -> AsyncGenerator[JsonObject]:
        """Send a request and yield the lines of its answer. Raises LocalLLMError if the process ends before."""
        self.is_answering = True
        await self.send(request)
        while self.is_answering:
            line = await self.read()
            self.is_answering = "end" not in line
            yield line

    async def send(self, request: JsonObject) -> None:
        assert self.process.stdin
        with suppress(ConnectionError):  # reading reports that it has ended
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            await self.process.stdin.drain()

    async def read(self) -> JsonObject:
        assert self.process.stdout
        try:
            return json.loads(await self.process.stdout.readline())
        except ValueError:
            raise LocalLLMError("the process for simulations has ended", "see the server's log") from None

    async def cancel(self) -> bool:
        """End the answer in progress. Returns whether the process can be used again; it is killed otherwise."""
        if self.process.returncode is not None:
            return False
        try:
            if self.is_answering:
                await self.send({"cancel": True})
                async with asyncio.timeout(CANCEL_LIMIT_S):
                    while "end" not in await self.read():
                        pass
                self.is_answering = False
        except (TimeoutError, LocalLLMError):
            await self.end()
            return False
        return True

    def keep(self) -> None:
        """Stop the time after which it ends."""
        if self.timer:
            self.timer.cancel()

    def end_when_idle(self, idle: "list[SimulationProcess]") -> None:
        """Leave the list of idle processes, and end, after IDLE_LIMIT_S."""

        def leave() -> None:
            if self in idle:
                idle.remove(self)
                self.process.kill()

        self.timer = asyncio.get_running_loop().call_later(IDLE_LIMIT_S, leave)

    async def end(self) -> None:
        self.keep()
        with suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()
