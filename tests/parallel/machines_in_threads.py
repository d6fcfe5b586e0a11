"""Stages on several machines as threads of this process: those of a stage share memory for their sums, and each
machine but the first has a TCP connection to it.
"""

import contextlib
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from localllm.arch.describe import parse_config
from localllm.arch.stages import Position
from localllm.checkpoint.header import read_header
from localllm.checkpoint.partition import divide_model
from localllm.parallel.channel import Channel, open_memory
from localllm.parallel.group import ProcessLeader
from localllm.parallel.handshake import prepare
from localllm.parallel.rank import follow
from localllm.parallel.remote import RemoteLeader, RemoteWorker, StageLeader, StageMember
from localllm.parallel.shared_sums import memory_bytes
from localllm.runtime.engine import Engine
from localllm.runtime.kv_cache.sequence_state import BlockPool
from tests.parallel.ranks_in_threads import BLOCK_SIZE, BLOCKS, CPU, STATE_SLOTS, make_runner


def connect_over_tcp() -> tuple[Channel, Channel]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for end in (near, far):
        prepare(end)
    return Channel(near), Channel(far)


def add_members(leader: ProcessLeader) -> list[StageMember]:
    """Give the first process of a machine the others of its stage."""
    members = []
    for rank in leader.members[1:]:
        near, far = map(Channel, socket.socketpair())
        leader.channels[rank] = near
        position = Position(rank, leader.shard.size, leader.position.borders, leader.shard.whole_experts)
        members.append(StageMember(position, leader.folder, CPU, far, across_machines=True))
    if members:
        descriptor = open_memory(memory_bytes(leader.shard.size))
        for each in (leader, *members):
            each.share_sums(os.dup(descriptor))
        os.close(descriptor)
    return members


@contextlib.contextmanager
def machines_in_threads(
    path: Path, shares: Sequence[float], size: int = 1, context: int = 256, *, whole_experts: bool = False
) -> Iterator[Engine]:
    """An engine with a stage on each machine. shares: of the weights; size: processes of each stage"""
    header = read_header(path)
    borders = divide_model(header, parse_config(header.config), shares)
    positions = [Position(stage * size, size, borders, whole_experts) for stage in range(len(shares))]
    workers, leaders = [], list[StageLeader]()
    for position in positions[1:]:
        near, far = connect_over_tcp()
        workers.append(RemoteWorker(f"rank {position.rank}", near, "cpu", "cpu", 0, "float32", ""))
        leaders.append(StageLeader(position, far, CPU))
    first = RemoteLeader(positions[0], CPU, workers)
    members = [member for leader in (first, *leaders) for member in add_members(leader)]
    followers = sorted([*members, *leaders], key=lambda each: each.position.rank)
    made = [
        make_runner(path, ranks, torch.float32, context, BLOCKS)[0]  # type: ignore[arg-type]
        for ranks in (first, *followers)
    ]
    first.other_caches.connect([runner.named_caches.types for runner in made[1:]], BLOCK_SIZE)
    errors = queue.SimpleQueue[BaseException]()

    def start(function: Callable[..., object], *arguments: Any) -> threading.Thread:
        def run() -> None:
            try:
                with torch.inference_mode():
                    function(*arguments)
            except Exception as error:
                errors.put(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    for thread in [start(each.connect) for each in (first, *followers)]:
        thread.join(30)
    setup = SimpleNamespace(block_size=BLOCK_SIZE)
    threads = [start(follow, each, runner, setup) for each, runner in zip(followers, made[1:], strict=True)]
    for leader in (first, *leaders):
        threads += (start(leader.watch, *pair) for pair in leader.channels.items())
    slots = STATE_SLOTS if any(runner.recurrent_caches for runner in made) else 0
    yield Engine(made[0], BlockPool(BLOCKS, BLOCK_SIZE, slots), 512, 16)
    for leader in (first, *leaders):
        leader.close()
    for thread in threads:
        thread.join(30)
    for follower in followers:
        follower.channel.close()
    assert errors.empty(), errors.get()
