"""The router of `localllm.routing` within Ray Serve, and the replicas that it routes to. Imports Ray."""

# pyright: reportMissingImports=false
# Ray is installed with localllm[cluster] only.

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.request_router import RequestRouter
from starlette.types import Message

from localllm.cluster.forwarded import ForwardedRequest
from localllm.cluster.front import END, ReplicaAnswer, ReplicaReport, no_replica
from localllm.errors import ReplicaLost
from localllm.routing import Router

START_WAIT_S = 60  # for which a request waits for a replica to start, before it is refused
ACCEPT_S = 15  # for which it waits for a replica to take it, before it is sent to another one
ASK_ALL_S = 10.0


class LocalRequestRouter(RequestRouter):
    """Ranks the replicas for a request by `localllm.routing`; Ray Serve sends it to the first that accepts it."""

    def initialize_state(self, route: str = "prefix", **_: Any) -> None:
        """Called by Ray Serve. route: one of `localllm.routing.ROUTES`"""
        self.core = Router[str](route)
        self.unfinished: Counter[str] = Counter()  # requests of this front, by replica
        self.running: set[str] = set()
        self.chosen: dict[int, str] = {}  # replicas of requests that none has taken yet, by their numbers
        self.loop: asyncio.AbstractEventLoop | None = None  # of Ray Serve, in a thread of its own
        # Ray makes this class again from its own copy, at times of its own, so that attributes of it do not last.
        module: Any = import_module("localllm.cluster.request_router")
        module.current = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None: with each restart, Ray Serve pickles this class by value, and `current` with it."""
        return type(None), ()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Called by Ray Serve: replicas in ranks of one each, the best first."""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if not by_id:
            return []
        forwarded = forwarded_request_of(pending_request)
        loads = {name: self.load_of(name, replica) for name, replica in by_id.items()}
        ranked = self.core.rank(forwarded.names, loads, is_bound=forwarded.is_bound)
        if not forwarded.is_bound:
            ranked.sort(key=lambda name: name in forwarded.avoid)
        if forwarded.number in self.chosen:
            self.chosen[forwarded.number] = ranked[0]
        return [[by_id[name]] for name in ranked]

    def load_of(self, name: str, replica: Any) -> int:
        """Requests that a replica has: those of this front, or what it reported last where others use it too."""
        return max(self.unfinished[name], self.replica_queue_len_cache.get(replica.replica_id) or 0)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        forwarded = forwarded_request_of(pending_request)
        self.core.sent(forwarded.names, replica_id.unique_id)

    def on_send_request(self, replica_id: Any) -> None:
        super().on_send_request(replica_id)
        self.unfinished[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        name = replica_id.unique_id
        self.unfinished[name] -= 1
        if self.unfinished[name] <= 0:
            del self.unfinished[name]

    def update_replicas(self, replicas: list[Any]) -> None:
        """Called by Ray Serve with all replicas that take requests."""
        super().update_replicas(replicas)
        now = {replica.replica_id.unique_id for replica in replicas}
        for name in self.running - now:
            self.core.forget(name)
        self.running = now
        self.loop = self._event_loop

    def call(self, method: Callable[..., object], *arguments: Any) -> None:
        """Call a method of the core where requests are routed, before those that come from now on."""
        if self.loop:
            self.loop.call_soon_threadsafe(method, *arguments)


current: LocalRequestRouter | None = None  # of this process


def forwarded_request_of(pending_request: Any) -> ForwardedRequest:
    """Return the request to route."""
    arguments = pending_request.args if pending_request else ()
    return arguments[0] if arguments and isinstance(arguments[0], ForwardedRequest) else ForwardedRequest({}, b"")


class RayFleet:
    """The replicas of a Ray Serve application, as `front.Fleet`."""

    def __init__(self, handle: Any):
        """handle: DeploymentHandle of `replica.Replica`"""
        self.handle = handle
        self.streams = handle.options(stream=True)
        self.cursors: dict[str, int] = {}  # of the last report, by replica
        self.numbers = itertools.count(1)

    async def answer(self, forwarded: ForwardedRequest) -> AsyncGenerator[Message]:
        forwarded.number = next(self.numbers)
        if router := current:
            router.chosen[forwarded.number] = ""
        response = self.streams.answer.remote(forwarded)
        messages = aiter(response)
        is_complete = False
        try:
            first = await self.first_of(messages, forwarded)
            for message in first:
                yield message
            async for batch in messages:
                is_complete = batch[-1]["type"] == END
                for message in batch:
                    yield message
            is_complete = True
        except (DeploymentUnavailableError, RayServeException, RayError, StopAsyncIteration) as error:
            is_complete = True
            raise ReplicaLost(
                f"the replica has ended ({type(error).__name__})", "send the request again"
            ) from error
        finally:
            if router:
                router.chosen.pop(forwarded.number, None)
            if not is_complete:
                response.cancel()

    async def first_of(self, messages: AsyncIterator[list[Message]], forwarded: ForwardedRequest) -> list[Message]:
        """The first messages, which come before the application is called: a replica that hangs sends none.

        Raises Busy if there is no replica for START_WAIT_S, and ReplicaLost for one that hangs.
        """
        first, waited_s = asyncio.ensure_future(anext(messages)), 0
        first.add_done_callback(lambda task: task.cancelled() or task.exception())  # of one that is given up
        try:
            while not (await asyncio.wait([first], timeout=1.0))[0]:
                waited_s += 1
                forwarded.chosen = current.chosen.get(forwarded.number, "") if current else ""
                if forwarded.chosen and waited_s >= ACCEPT_S:
                    raise ReplicaLost(f"the replica has not answered for {ACCEPT_S} s", "send the request again")
                if waited_s >= START_WAIT_S:
                    raise no_replica()
            return first.result()
        finally:
            first.cancel()

    async def ask_all(self, forwarded: ForwardedRequest) -> list[ReplicaAnswer]:
        answers: list[ReplicaAnswer] = await self.broadcast("respond", forwarded)
        return sorted(answers, key=lambda answer: (int(answer.number), answer.id))

    async def broadcast(self, method: str, argument: Any) -> list[Any]:
        """Call a method of all replicas, and return the results of those that answer within ASK_ALL_S."""
        with suppress(RayError, RayServeException, TimeoutError):  # there is none
            response: Any = self.handle.broadcast(method, argument)
            # One by one, as `results_async` has no results at all if one replica hangs.
            async with asyncio.timeout(ASK_ALL_S):
                calls = await response._fetch_replica_results_async()
            results = [asyncio.wait_for(each.get_async(), ASK_ALL_S) for each in calls]
            answers = await asyncio.gather(*results, return_exceptions=True)
            return [each for each in answers if not isinstance(each, BaseException)]
        return []

    def bind(self, name: bytes, replica: str) -> None:
        if router := current:
            router.call(router.core.add_owner, [name], replica)

    def knows(self, name: bytes) -> bool:
        return current is not None and bool(current.core.owners.get(name))

    async def learn(self) -> None:
        reports: list[ReplicaReport] = await self.broadcast("report", self.cursors)
        if not (router := current):
            return
        for report in reports:
            if report.id in router.running:
                self.cursors[report.id] = report.cursor
                router.call(router.core.learn, report.id, report.held, report.evicted)
        for ended in self.cursors.keys() - router.running:
            del self.cursors[ended]
