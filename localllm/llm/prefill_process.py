"""A process that computes prompts for those that answer: `python -m localllm.llm.prefill_process CONTROL SOCKET`.

It loads the whole model, hands over keys and values through a file that each of them sends, and ends with the
process at the other end of CONTROL, which has started it (`disaggregation/supervisor.py`). A worker's process does
the same for a server on another machine, over their connection (`serve_server`).
"""

import json
import os
import queue
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from localllm.disaggregation.prefill_engine import Peer, PrefillEngine
from localllm.disaggregation.tensor_stream import TensorStream
from localllm.disaggregation.transport import SharedMemory
from localllm.errors import LocalLLMError, UsageError
from localllm.hardware.device import device_context
from localllm.hub.resolve import ModelRef
from localllm.llm.build import build
from localllm.llm.find import LoadRequest, find
from localllm.llm.load_plan import plan
from localllm.metrics import PhaseTimer
from localllm.parallel.channel import EXIT_WAIT_S, LOADED, SETUP, Channel
from localllm.parallel.handshake import EARLY_BYTES
from localllm.plan.fit import LoadOptions
from localllm.runtime.kernels.threads import end_openmp_threads
from localllm.runtime.kv_cache.prefix_copy import frequencies_digest
from localllm.settings import Settings


@dataclass(frozen=True)
class Setup:
    """The model and settings that a decoding process requests of this one."""

    name: str
    path: str  # of the model
    dtype: str
    kv_dtype: str
    activation_bits: int
    threads: int
    context: int
    deterministic: bool
    force: bool
    max_memory: int | None  # bytes
    slot_bytes: int = 0  # of the shared memory, if there is one

    def check(self, other: "Setup") -> None:
        """Raise UsageError if keys and values of this setup are not those of another one."""
        for field in ("path", "dtype", "kv_dtype", "activation_bits", "deterministic"):
            mine, wanted = getattr(self, field), getattr(other, field)
            if mine != wanted:
                name = field.replace("_", " ")
                raise UsageError(f"it has loaded another {name}: {mine}, not {wanted}", "restart the server")

    def request(self, device: torch.device) -> LoadRequest:
        settings = replace(
            Settings.from_environment(),
            threads=self.threads,
            activations=str(self.activation_bits),
            disk_cache=None,
            deterministic=self.deterministic,
        )
        return LoadRequest(
            ref=ModelRef(self.name, Path(self.path)),
            draft_ref=None,
            device=device,
            options=LoadOptions(self.context, dtype=self.dtype, kv_dtype=self.kv_dtype),
            drafting="off",
            deterministic=self.deterministic,
            grammar=None,
            force=self.force,
            max_queue=1,
            settings=settings,
            phases=PhaseTimer(),
            on_part=lambda done, total: None,
            max_memory=self.max_memory,
        )


class PromptServer:
    """Accepts the processes that answer, loads the model as the first of them wants it, and computes the prompts
    of all."""

    def __init__(self, control: Channel, listener: socket.socket):
        """control: to the process that has started this one; listener: of a Unix socket"""
        self.control, self.listener = control, listener
        self.setups: queue.SimpleQueue[Setup] = queue.SimpleQueue()
        self.loaded = Future[Loaded]()
        self.threads: list[threading.Thread] = []

    def run(self) -> None:
        """Serve until the process that has started this one ends, or this one has failed."""
        message = self.control.receive()
        if message is None:
            return
        assert message[0] == SETUP
        device = torch.device(json.loads(message[1])["device"])
        for work in (self.end_with_parent, self.accept):
            threading.Thread(target=work, daemon=True).start()
        try:
            loaded = load(self.setups.get(), device)
            self.loaded.set_result(loaded)
            self.control.send(LOADED, b"")
            with device_context(device):
                loaded.engine.run()
        except Exception as error:
            cause = error if isinstance(error, LocalLLMError) else unexpected(error)
            self.control.send_failure(cause)
            if not self.loaded.done():
                self.loaded.set_exception(cause)
                for thread in self.threads:  # which report it too
                    thread.join(EXIT_WAIT_S)

    def end_with_parent(self) -> None:
        self.control.receive()
        os._exit(0)

    def accept(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            thread = threading.Thread(target=self.serve, args=(connection,), daemon=True)
            self.threads = [each for each in self.threads if each.is_alive()] + [thread]
            thread.start()

    def serve(self, connection: socket.socket) -> None:
        """Serve a process that answers until it ends: the body of a thread."""
        channel = Channel(connection)
        try:
            engine, peer = self.admit(channel)
        except (LocalLLMError, OSError) as error:
            if isinstance(error, LocalLLMError):
                channel.send_failure(error)
            channel.close()
        else:
            engine.serve(peer)

    def admit(self, channel: Channel) -> tuple[PrefillEngine, Peer]:
        """Return the engine, once it is loaded, and a process that answers as its peer. Raises LocalLLMError if it
        does not load or has another model, OSError if the peer has ended."""
        _, descriptors, _, _ = socket.recv_fds(channel.connection, 1, 1)
        message = channel.receive()
        if message is None:
            raise ConnectionResetError
        setup = Setup(**json.loads(message[1]))
        memory = SharedMemory(descriptors[0], setup.slot_bytes)
        os.close(descriptors[0])
        self.setups.put(setup)
        loaded = self.loaded.result()
        loaded.setup.check(setup)
        channel.send(LOADED, json.dumps(loaded.fields).encode())
        return loaded.engine, Peer(channel, memory)


@dataclass(frozen=True)
class Loaded:
    """A model that is ready, with the properties of it that are sent to the decoding processes."""

    setup: Setup
    engine: PrefillEngine
    fields: dict[str, Any]


def load(setup: Setup, device: torch.device) -> Loaded:
    """Load a model. Raises the errors of `llm.loader.load`."""
    request = setup.request(device)
    torch.set_num_threads(setup.threads)
    model = find(request)
    load_plan = plan(model, request)
    text = load_plan.text
    if text.own.template:  # nothing is rendered here
        text.own.template.close()
        load_plan = replace(load_plan, text=replace(text, own=replace(text.own, template=None)))
    engine = build(model, load_plan, request).engine
    end_openmp_threads()
    context = load_plan.memory.context
    fields = {"frequencies": frequencies_digest(engine.runner), "context": context}
    return Loaded(setup, PrefillEngine(engine, context), fields)


def serve_server(channel: Channel, setup: Setup, device: torch.device) -> None:
    """Compute prompts for a server on another machine. Raises the errors of `load`, and those that end an
    engine."""
    loaded = load(setup, device)
    channel.send(LOADED, json.dumps(loaded.fields).encode())
    stream = TensorStream(channel, EARLY_BYTES + 4 * loaded.engine.context)
    threading.Thread(target=loaded.engine.serve, args=(Peer(stream, stream),), daemon=True).start()
    with device_context(device):
        loaded.engine.run()


def unexpected(error: Exception) -> LocalLLMError:
    return LocalLLMError(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that has started this one handles Ctrl-C
    connection, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    server = PromptServer(Channel(connection), listener)
    server.run()
    os._exit(1)  # without waiting for threads of torch
