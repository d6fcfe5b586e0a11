"""A replica: the server's application, unchanged, called by messages instead of a connection. Ray Serve runs it in
a process of its own, which listens on nothing but Ray's channel."""

# pyright: reportMissingImports=false
# Ray is installed with localllm[cluster] only.

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from importlib import import_module
from typing import Any

from filelock import FileLock
from starlette.types import Message

from localllm.cluster.forwarded import RESPONSE_ID, ForwardedRequest, response_name
from localllm.cluster.front import BODY, END, REPLICA, START, ReplicaAnswer, ReplicaReport
from localllm.errors import EngineFailed, LocalLLMError
from localllm.llm.llm import LLM
from localllm.request import PREFIX_NAMES, PrefixNames
from localllm.runtime.kv_cache.prefix_journal import PrefixJournal
from localllm.server.app import ServerSetup
from localllm.server.request_stats import CURRENT_REQUEST
from localllm.settings import Settings

LOAD_LOCK = "replica-load.lock"
CANCEL_S = 5.0  # for which a request may clean up after its client has left


class Replica:
    def __init__(self, setup: ServerSetup, generation: int):
        """Load the models of a setup. generation: of a rolling restart; a higher one replaces all replicas"""
        close_internal_port()
        logging.getLogger("localllm.requests").setLevel(logging.WARNING)  # the front logs requests
        home = Settings.from_environment().home
        home.mkdir(parents=True, exist_ok=True)
        # One after the other, so that each plans with the memory that those before it have left.
        with FileLock(home / LOAD_LOCK):
            self.app, self.pool = setup.build()
        self.id, self.number = own_identity()
        self.bound = PrefixJournal()  # names of what only this replica has
        self.journals()

    async def answer(self, forwarded: ForwardedRequest) -> AsyncGenerator[list[Message]]:
        """The application's messages, between REPLICA and END. Those that have piled up travel together, as a
        message through Ray costs more than its bytes. Closing it disconnects the client."""
        yield [{"type": REPLICA, "id": self.id, "number": self.number}]
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        left, body = asyncio.Event(), [forwarded.body]

        async def receive() -> Message:
            if body:
                return {"type": "http.request", "body": body.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        if forwarded.is_bound:
            self.bound.hold(forwarded.names)
        response_id, needs_id = "", forwarded.scope["path"] == "/v1/responses"
        context = contextvars.copy_context()
        context.run(PREFIX_NAMES.set, PrefixNames(forwarded.names, forwarded.share))
        request = asyncio.create_task(self.app(forwarded.scope, receive, messages.put), context=context)
        request.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            ended = False
            while not ended:
                batch = [await messages.get()]
                await asyncio.sleep(0)  # the application continues, and ends if only its end was left
                if is_last(batch[0]):  # the application ends now, having written its log
                    await asyncio.wait([request], timeout=CANCEL_S)
                while not messages.empty():
                    batch.append(messages.get_nowait())
                ended = batch[-1] is None
                sent = [message for message in batch if message is not None]
                if needs_id and not response_id and (response_id := find_response_id(sent)):
                    self.bound.hold([response_name(response_id)])
                if ended:
                    stats = context.get(CURRENT_REQUEST)
                    summary = stats.summary() if stats else {}
                    sent.append({"type": END, "stats": summary, "response_id": response_id})
                yield sent
        finally:
            left.set()
            if not request.done():
                await asyncio.wait([request], timeout=CANCEL_S)
                request.cancel()
            elif not request.cancelled():
                request.exception()  # the application has answered and logged it

    async def respond(self, forwarded: ForwardedRequest) -> ReplicaAnswer:
        """The whole answer, of a request that all replicas get."""
        status, headers, body = 500, [], b""
        async for messages in self.answer(forwarded):
            for message in messages:
                if message["type"] == START:
                    status, headers = message["status"], message["headers"]
                elif message["type"] == BODY:
                    body += message.get("body", b"")
        return ReplicaAnswer(self.id, self.number, status, headers, body)

    def journals(self) -> list[PrefixJournal]:
        """Return the journals of all loaded models, which are begun here."""
        llms = [loaded.llm for loaded in self.pool.loaded.values()]
        pools = [llm.worker.engine.pool for llm in llms if isinstance(llm, LLM)]
        for pool in pools:
            pool.journal = pool.journal or PrefixJournal()
        return [pool.journal for pool in pools if pool.journal]

    async def report(self, cursors: Mapping[str, int]) -> ReplicaReport:
        """Changes of the prefix caches since the last report to a front. cursors: of that report, by replica

        Models that were unloaded are not reported: they are loaded again where they were.
        """
        cursor, held, evicted = cursors.get(self.id, 0), list[Hashable](), list[Hashable]()
        newest = cursor
        for journal in (self.bound, *self.journals()):
            changes = journal.since(cursor)
            newest = max(newest, changes.cursor)
            held += changes.held
            evicted += changes.evicted
        return ReplicaReport(self.id, newest, held, evicted)

    def check_health(self) -> None:
        """Called by Ray Serve, which restarts a replica whose check fails. Raises EngineFailed."""
        if any(loaded.has_failed for loaded in self.pool.loaded.values()):
            raise EngineFailed("the engine of a model has failed", "Ray starts the replica again")


def find_response_id(messages: Sequence[Message]) -> str:
    """The id of a response of OpenAI's Responses API that begins in these messages; "" if none does."""
    for message in messages:
        if message["type"] == BODY and (match := RESPONSE_ID.search(message.get("body", b""))):
            return match[1].decode()
    return ""


def is_last(message: Message | None) -> bool:
    return message is not None and message["type"] == BODY and not message.get("more_body", False)


def close_internal_port() -> None:
    """Keep Ray Serve from listening in this process for calls between deployments: on all interfaces, and without
    Ray's token. Calls through Ray's own channel do not use it. Raises LocalLLMError for another version of Ray."""
    module: Any = import_module("ray.serve._private.replica")
    if not hasattr(module, "add_port_to_grpc_server"):
        raise LocalLLMError("this version of Ray opens its ports in another way", 'install "localllm[cluster]"')
    module.add_port_to_grpc_server = lambda server, address: 0


def own_identity() -> tuple[str, str]:
    """Id and number, from 1, of the replica that runs in this process. A restarted one has a new id and the number
    of the one that it replaces."""
    from ray import serve

    context: Any = serve.get_replica_context()
    rank = context.rank
    return context.replica_id.unique_id, str(getattr(rank, "rank", rank) + 1)
