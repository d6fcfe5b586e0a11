"""A process that computes prompts for one that answers: `python -m localllm.llm.prefill_process SOCKET MEMORY`.

It loads the whole model, hands over keys and values through the file MEMORY, and ends with the other process.
"""

import contextlib
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from localllm.disaggregation.prefill_engine import Peer, PrefillEngine
from localllm.disaggregation.transport import FAILED, LOADED, SETUP, SharedMemory
from localllm.errors import LocalLLMError
from localllm.hardware.device import device_context
from localllm.hub.resolve import ModelRef
from localllm.llm.build import build
from localllm.llm.find import LoadRequest, find
from localllm.llm.load_plan import plan
from localllm.metrics import PhaseTimer
from localllm.parallel.channel import Channel
from localllm.plan.fit import LoadOptions
from localllm.runtime.kernels.threads import end_openmp_threads
from localllm.runtime.kv_cache.prefix_copy import frequencies_digest
from localllm.settings import Settings


@dataclass(frozen=True)
class Setup:
    """What the process is started with."""

    name: str
    path: str  # of the model
    device: str
    dtype: str
    kv_dtype: str
    activation_bits: int
    threads: int
    context: int
    deterministic: bool
    force: bool
    max_memory: int | None  # bytes
    slot_bytes: int  # of the shared memory

    def request(self) -> LoadRequest:
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
            device=torch.device(self.device),
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


def serve_prompts(channel: Channel, memory: int) -> None:
    """Load the model, and compute the prompts that arrive. memory: descriptor of the shared file"""
    message = channel.receive()
    if message is None:
        return
    assert message[0] == SETUP
    setup = Setup(**json.loads(message[1]))
    request = setup.request()
    torch.set_num_threads(setup.threads)
    try:
        model = find(request)
        load_plan = plan(model, request)
        text = load_plan.text
        if text.own.template:  # nothing is rendered here
            text.own.template.close()
            load_plan = replace(load_plan, text=replace(text, own=replace(text.own, template=None)))
        engine = build(model, load_plan, request).engine
        end_openmp_threads()
        loaded = {"frequencies": frequencies_digest(engine.runner), "context": load_plan.memory.context}
        channel.send(LOADED, json.dumps(loaded).encode())
        peer = Peer(channel, SharedMemory(memory, setup.slot_bytes))
        with device_context(request.device):
            PrefillEngine(engine, [peer], load_plan.memory.context).run()
    except LocalLLMError as error:
        report_failure(channel, error.message, error.remedy)
    except Exception as error:
        report_failure(channel, f"{type(error).__name__}: {error}", None)


def report_failure(channel: Channel, message: str, remedy: str | None) -> None:
    """Report why this process ends, unless the other has ended."""
    with contextlib.suppress(OSError):
        channel.send(FAILED, json.dumps({"message": message, "remedy": remedy}).encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that answers handles Ctrl-C
    serve_prompts(Channel(socket.socket(fileno=int(sys.argv[1]))), int(sys.argv[2]))
    os._exit(0)  # without waiting for threads of torch
