"""A process of tensor or pipeline parallelism other than the first.

`python -m localllm.parallel.rank SOCKET [MEMORY]` loads its part of the model, runs the steps that rank 0 sends,
and ends with it. MEMORY is for the sums of its stage.
"""

import json
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from localllm.arch.describe import parse_config
from localllm.arch.stages import Position
from localllm.checkpoint.header import read_header
from localllm.checkpoint.partition import part_of_model
from localllm.hardware.device import anonymous_bytes, device_context, rank_device
from localllm.metrics import PhaseTimer
from localllm.parallel.channel import CACHES, COPIED, COPY_IN, COPY_OUT, SETUP, STEP, Channel, wait_for_hangup
from localllm.parallel.group import ProcessFollower
from localllm.parallel.remote import StageLeader, StageMember
from localllm.parallel.remote_caches import answer_copy_in, answer_copy_out
from localllm.parallel.steps import StepDecoder
from localllm.quant.vectors import KV_DTYPES
from localllm.runtime.kernels.threads import end_openmp_threads
from localllm.runtime.kv_cache.host_copies import HostCopy, to_part
from localllm.runtime.kv_cache.sequence_state import BlockPool
from localllm.runtime.model import Decoder
from localllm.runtime.model_loader import compile_kernels, load_decoder, warm_up
from localllm.runtime.runner import Runner


@dataclass(frozen=True)
class Setup:
    """What a rank is started with."""

    position: Position
    path: str  # of the model
    device: str  # of the first rank on this machine
    dtype: str
    kv_dtype: str
    activation_bits: int
    deterministic: bool
    threads: int
    block_size: int
    blocks: int
    state_slots: int
    max_running: int
    context: int
    folder: str = ""  # where the ranks of a machine exchange their addresses
    across_machines: bool = False  # whether each stage is on a machine of its own

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Setup":
        """Return the setup that rank 0 has sent as JSON."""
        position: dict[str, Any] = {**fields["position"], "borders": tuple(fields["position"]["borders"])}
        values: dict[str, Any] = {**fields, "position": Position(**position)}
        return cls(**values)


def serve_rank(channel: Channel, memory: list[int]) -> None:
    """Load the part of the model that this rank has, and run what rank 0 sends until it ends.

    memory: descriptor of the memory that the stage shares for its sums, if it shares any
    """
    message = channel.receive()
    if message is None:
        return
    kind, content = message
    assert kind == SETUP
    setup = Setup.from_fields(json.loads(content))
    position = setup.position
    index = position.shard.rank if setup.across_machines else position.rank  # among the processes of this machine
    device = rank_device(torch.device(setup.device), index)
    try:
        follower = StageMember if setup.across_machines else ProcessFollower
        ranks = follower(position, Path(setup.folder), device, channel, across_machines=setup.across_machines)
        if memory:
            ranks.share_sums(*memory)
        run_rank(setup, device, ranks)
    except Exception as error:
        channel.send_failure(error)


def run_rank(setup: Setup, device: torch.device, ranks: ProcessFollower | StageLeader) -> None:
    """Load a part of the model, report that, and run what rank 0 sends until it ends. ranks: of this process"""
    torch.set_num_threads(setup.threads)
    with torch.inference_mode(), device_context(device):
        read_bytes, anonymous = 0, anonymous_bytes()

        def on_part(done: int, total: int) -> None:
            nonlocal read_bytes
            read_bytes = done

        whole = read_header(Path(setup.path))
        header, config = part_of_model(whole, parse_config(whole.config), setup.position)
        decoder, _ = load_decoder(
            header,
            config,
            device,
            getattr(torch, setup.dtype),
            setup.context,
            PhaseTimer(),
            on_part,
            setup.activation_bits,
            ranks=ranks,
        )
        sizes = {
            "blocks": setup.blocks,
            "state_slots": setup.state_slots,
            "max_running": setup.max_running,
            "context": setup.context,
        }
        runner, pool = make_runner(decoder, setup, device, sizes)
        if device.type == "cpu":
            compile_kernels(runner, pool, setup.threads)
        weight_bytes = max(0, anonymous_bytes() - anonymous)
        loaded = {
            "read_bytes": read_bytes,
            "weight_bytes": min(weight_bytes, header.stored_bytes),
            "cache_types": runner.named_caches.types.to_json(),
        }
        ranks.finish_load(loaded)
        if device.type != "cpu":
            warm_up(runner, pool)
        end_openmp_threads()
        follow(ranks, runner, setup)


def make_runner(
    decoder: Decoder, setup: Setup, device: torch.device, sizes: dict[str, int]
) -> tuple[Runner, BlockPool]:
    dtype: torch.dtype = getattr(torch, setup.dtype)
    decoder.set_max_len(sizes["context"], device)
    runner = Runner(
        decoder,
        sizes["blocks"],
        setup.block_size,
        dtype,
        device,
        sizes["state_slots"],
        KV_DTYPES.get(setup.kv_dtype, dtype),
        sizes["max_running"],
        deterministic=setup.deterministic,
    )
    return runner, BlockPool(sizes["blocks"], setup.block_size, sizes["state_slots"])


def follow(ranks: ProcessFollower | StageLeader, runner: Runner, setup: Setup) -> None:
    """Run what rank 0 sends, until it ends. ranks: of this process"""
    decoder, steps = runner.model, StepDecoder()
    copies: SimpleQueue[HostCopy] = SimpleQueue()
    threading.Thread(target=send_copies, args=(ranks.channel, copies), daemon=True).start()
    while (message := ranks.next_message()) is not None:
        kind, content = message
        if kind == CACHES:
            runner.free()
            runner, _ = make_runner(decoder, setup, runner.device, json.loads(content))
            continue
        if kind == COPY_OUT:
            copies.put(answer_copy_out(runner, content))
            continue
        if kind == COPY_IN:
            answer_copy_in(runner, content, setup.block_size)
            continue
        assert kind == STEP
        step = steps.decode(content)
        batch = step.batch(runner.device)
        if step.has_unread and decoder.ranks:
            decoder.ranks.broadcast(batch.token_ids)
        if step.hidden:
            runner.hidden_states(batch)
        else:
            runner.launch(batch)


def send_copies(channel: Channel, copies: "SimpleQueue[HostCopy]") -> None:
    """Send copies of the caches as the device delivers them: the body of a thread."""
    try:
        while True:
            channel.send_parts(COPIED, [to_part(tensor).data for tensor in copies.get().wait().values()])
    except OSError:  # rank 0 has ended, which `follow` notices
        pass
    except Exception as error:
        channel.send_failure(error)


def end_with(connection: socket.socket) -> None:
    """End this process, whatever it waits for, when the one that has started it ends: the body of a thread."""
    wait_for_hangup(connection)
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles Ctrl-C
    descriptor, *memory = map(int, sys.argv[1:])
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=end_with, args=(connection,), daemon=True).start()
    serve_rank(Channel(connection), memory)
    os._exit(0)  # without waiting for threads of torch


if __name__ == "__main__":
    main()
