"""A worker's process for one stage of a pipeline: `python -m localllm.llm.stage_process SOCKET CONNECTION`.

It says what its device has, finds the model here, compares its files with those of the first machine, and computes
what that sends. It ends with the connection, and with the worker that has started it.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from localllm.arch.describe import parse_config
from localllm.checkpoint.digest import FileDigest, digest_model
from localllm.checkpoint.header import read_header
from localllm.checkpoint.stages import part_of_model
from localllm.errors import ModelNotFound, UsageError
from localllm.hardware.device import DTYPES, dtype_for, free_bytes, processor_features, resolve_device
from localllm.hub.names import is_path
from localllm.hub.resolve import resolve_model
from localllm.parallel.channel import FACTS, FAILED, MODEL, SETUP, Channel
from localllm.parallel.rank import Setup, run_rank
from localllm.parallel.remote import StageFollower
from localllm.quantize.quantizer import find_or_quantize
from localllm.runtime.kernels.threads import threads_for
from localllm.settings import Settings

HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # the last on Linux, of one direction


def serve_stage(channel: Channel, device_name: str, control: Channel, peer: str) -> None:
    """Compute a stage for the first machine, until that ends. control: to the worker, which shows messages; peer:
    address of the first machine"""
    settings = Settings.from_environment()
    try:
        device = resolve_device(settings.device if device_name == "auto" else device_name)
        facts = {
            "device": str(device),
            "device_type": device.type,
            "free_bytes": free_bytes(device),
            "auto_dtype": dtype_for("auto", "BF16", device.type),
            "processor": processor_features(device),
        }
        channel.send(FACTS, json.dumps(facts).encode())
        message = channel.receive()
        if message is None or message[0] != MODEL:
            return
        wanted = json.loads(message[1])
        path = find_files(wanted["name"], wanted["quant"], settings)
        compare_files(wanted["name"], wanted["files"], digest_model(path))
        channel.send(MODEL, b"{}")
        message = channel.receive()
        if message is None or message[0] != SETUP:
            return
        setup = complete_setup(json.loads(message[1]), path, device, settings)
        stage = setup.position.stage
        assert stage
        layers = f"layers {stage.first + 1} to {stage.end} of {stage.total} of {wanted['name']}"
        control.send(SETUP, f"computing {layers} on {device} for {peer}".encode())
        run_rank(setup, device, StageFollower(setup.position, channel))
    except ConnectionError:
        return  # the first machine has left
    except Exception as error:
        control.send(FAILED, f"the stage for {peer} failed: {error}".encode())
        channel.send_failure(error)


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
    return replace(setup, threads=threads_for(part.stored_bytes, settings.threads))


def end_with(connection: socket.socket, control: socket.socket) -> None:
    """End this process when the first machine has left, or the worker has ended: the body of a thread."""
    poll = select.poll()
    poll.register(connection, HUNG_UP)
    poll.register(control, HUNG_UP)
    poll.poll()
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker handles Ctrl-C
    control, connection = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    worker = Channel(control)
    message = worker.receive()
    if message:
        threading.Thread(target=end_with, args=(connection, control), daemon=True).start()
        fields = json.loads(message[1])
        serve_stage(Channel(connection), fields["device"], worker, fields["peer"])
    os._exit(0)  # without waiting for threads of torch


if __name__ == "__main__":
    main()
