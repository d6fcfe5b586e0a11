"""A worker's process for another machine: `python -m localllm.llm.stage_process SOCKET CONNECTION`.

It says what its device has, finds the model here, compares its files with those of the first machine, and computes
a stage of a pipeline for it, with further processes if tensor parallelism divides that, or prompts
(`prefill_process.py`). It ends with the connection, and with the worker that has started it.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from localllm.arch.describe import parse_config
from localllm.checkpoint.digest import FileDigest, digest_model
from localllm.checkpoint.header import read_header
from localllm.checkpoint.partition import part_of_model
from localllm.errors import ModelNotFound, UsageError
from localllm.hardware.device import (
    DTYPES,
    dtype_for,
    free_bytes,
    processor_features,
    rank_device,
    resolve_device,
)
from localllm.hub.names import is_path
from localllm.hub.resolve import resolve_model
from localllm.parallel.channel import FACTS, FAILED, MODEL, PREFILL, SETUP, Channel, wait_for_hangup
from localllm.parallel.rank import Setup, run_rank
from localllm.parallel.remote import StageLeader
from localllm.quantize.quantizer import find_or_quantize
from localllm.runtime.kernels.threads import threads_for
from localllm.settings import Settings


class StageProcess:
    """The process of a stage, and those that it starts for parts of it. It ends with the first machine."""

    def __init__(self, channel: Channel, control: Channel, device_name: str, peer: str, processes: int):
        """channel: to the first machine; control: to the worker, which shows messages; peer: address of the first
        machine; processes: that it wants for the stage"""
        self.channel = channel
        self.control = control
        self.device_name = device_name
        self.peer = peer
        self.processes = processes
        self.ranks: StageLeader | None = None
        self.ending = threading.Lock()  # held until the process ends

    def serve(self) -> None:
        """Compute a stage for the first machine, until that ends."""
        try:
            self.run(Settings.from_environment())
        except ConnectionError:
            pass  # the first machine has left
        except Exception as error:
            self.fail(error)
        self.end()

    def run(self, settings: Settings) -> None:
        channel = self.channel
        device = resolve_device(settings.device if self.device_name == "auto" else self.device_name)
        facts = facts_of(device, self.processes)
        channel.send(FACTS, json.dumps(facts).encode())
        message = channel.receive()
        if message is None or message[0] != MODEL:
            return
        wanted = json.loads(message[1])
        path = find_files(wanted["name"], wanted["quant"], settings)
        compare_files(wanted["name"], wanted["files"], digest_model(path))
        channel.send(MODEL, b"{}")
        message = channel.receive()
        if message and message[0] == PREFILL:
            return self.compute_prompts(json.loads(message[1]), path, device, settings)
        if message is None or message[0] != SETUP:
            return
        setup = complete_setup(json.loads(message[1]), path, device, settings)
        stage, size = setup.position.stage, setup.position.tensor_size
        assert stage
        layers = f"layers {stage.first + 1} to {stage.end} of {stage.total} of {wanted['name']}"
        among = f" in {size} processes" if device.type == "cpu" else f" to {rank_device(device, size - 1)}"
        self.control.send(
            SETUP, f"computing {layers} on {device}{among if size > 1 else ''} for {self.peer}".encode()
        )
        self.ranks = StageLeader(setup.position, channel, device)
        self.ranks.on_failure = self.fail
        self.ranks.start(asdict(setup))
        run_rank(setup, device, self.ranks)

    def compute_prompts(
        self, fields: dict[str, Any], path: Path, device: torch.device, settings: Settings
    ) -> None:
        """Compute prompts for a server, with its number of threads if results are deterministic. Raises as
        `serve_server`."""
        from localllm.llm import prefill_process  # a stage does not need an engine

        setup = replace(prefill_process.Setup(**fields), path=str(path))
        if not setup.deterministic:
            setup = replace(setup, threads=threads_for(read_header(path).stored_bytes, settings.threads))
        self.control.send(SETUP, f"computing prompts of {setup.name} on {device} for {self.peer}".encode())
        prefill_process.serve_server(self.channel, setup, device)

    def fail(self, error: Exception) -> None:
        """Report an error to the first machine and the worker, and end."""
        with self.ending:
            with contextlib.suppress(OSError):
                self.control.send(FAILED, f"computing for {self.peer} failed: {error}".encode())
            self.channel.send_failure(error)
            self.end_at_once()

    def end_with(self, *connections: socket.socket) -> None:
        """End when the first machine has left, or the worker has ended: the body of a thread."""
        wait_for_hangup(*connections)
        self.end()

    def end(self) -> None:
        with self.ending:
            self.end_at_once()

    def end_at_once(self) -> None:
        if self.ranks:
            self.ranks.kill()
        os._exit(0)  # without waiting for threads of torch


def facts_of(device: torch.device, processes: int) -> dict[str, Any]:
    """Return fields of `RemoteWorker`. processes: of this machine's stage, on GPUs from `device` on. Raises
    NoSuchDevice if there are too few."""
    devices = [resolve_device(str(rank_device(device, rank))) for rank in range(processes)]
    share = processes if device.type == "cpu" else 1
    return {
        "device": str(device),
        "device_type": device.type,
        "free_bytes": min(map(free_bytes, devices)) // share,
        "auto_dtype": dtype_for("auto", "BF16", device.type),
        "processor": ", ".join(dict.fromkeys(map(processor_features, devices))),
    }


def find_files(name: str, quant: str | None, settings: Settings) -> Path:
    """Return the model's folder or GGUF file on this machine, quantized first if requested.

    Raises ModelNotFound, and as `find_or_quantize`.
    """
    try:
        path = resolve_model(name).path
    except ModelNotFound as error:
        remedy = "copy the same files to that path there" if is_path(name) else f"run `localllm pull {name}` there"
        raise ModelNotFound(f"it has no model {name}", remedy) from error
    if quant is None:
        return path
    return find_or_quantize(read_header(path), quant, settings.home)


def compare_files(name: str, wanted: Sequence[Sequence[Any]], own: Sequence[FileDigest]) -> None:
    """Compare a model's files with those of the first machine, which are fields of `FileDigest`. Raises UsageError
    unless they are the same."""
    here = {file.path: file for file in own if file.affects_logits}
    for fields in wanted:
        file = FileDigest(*fields)
        if file.path not in here or not file.matches(here.pop(file.path)):
            raise UsageError(
                f"{file.path} of {name} differs from that of the first machine", "use the same revision on both"
            )
    if here:
        raise UsageError(
            f"{name} has {next(iter(here))}, which the first machine lacks", "use the same files on both"
        )


def complete_setup(fields: dict[str, Any], path: Path, device: torch.device, settings: Settings) -> Setup:
    """Return the setup of this process from that of the first machine. On a CPU, the bits of deterministic results
    depend on the number of threads, which is then that of the first machine."""
    if fields["dtype"] not in DTYPES:
        raise UsageError(f"there is no dtype {fields['dtype']!r}", f"use one of {', '.join(DTYPES)}")
    setup = Setup.from_fields(fields | {"path": str(path), "device": str(device)})
    if setup.deterministic:
        return setup
    header = read_header(path)
    part, _ = part_of_model(header, parse_config(header.config), setup.position)
    size = setup.position.tensor_size
    threads = threads_for(part.stored_bytes * size, settings.threads)
    return replace(setup, threads=max(1, threads // size))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker handles Ctrl-C
    control, connection = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    worker = Channel(control)
    message = worker.receive()
    if message:
        fields = json.loads(message[1])
        process = StageProcess(Channel(connection), worker, **fields)
        threading.Thread(target=process.end_with, args=(connection, control), daemon=True).start()
        process.serve()


if __name__ == "__main__":
    main()
