"""Thousands of traces through the router that fronts and simulations share."""

import random
from collections import Counter

import pytest

from localllm.routing import MAX_AHEAD, MAX_OWNERS, ROUTES, Router

TRACES = {"round-robin": 20, "load": 20, "prefix": 120}  # of 40 requests


def random_names(rng: random.Random) -> list[tuple[int, ...]]:
    """Names of a prompt that often begins as others do."""
    pieces = [rng.randrange(2) for _ in range(rng.randrange(6))]
    return [tuple(pieces[: end + 1]) for end in range(len(pieces))]


@pytest.mark.parametrize("route", ROUTES)
def test_any_trace_keeps_loads_even_and_state_bounded(route: str) -> None:
    for seed in range(TRACES[route]):
        rng = random.Random(seed)
        router = Router[int](route, max_names=20)
        loads = dict.fromkeys(range(rng.randrange(1, 5)), 0)
        for _ in range(40):
            names = random_names(rng)
            ranked = router.rank(names, loads)
            assert sorted(ranked) == sorted(loads)
            least, chosen = min(loads.values()), ranked[0]
            if route != "round-robin":
                assert loads[chosen] - least <= (MAX_AHEAD if route == "prefix" and names else 0)
            router.sent(names, chosen)
            loads[chosen] += 1
            if rng.random() < 0.2:  # what a replica reports of requests of other routers
                router.learn(rng.choice(list(loads)), random_names(rng), random_names(rng))
            busy = [replica for replica, load in loads.items() if load]
            for replica in rng.sample(busy, rng.randrange(len(busy) + 1)):
                loads[replica] -= 1
            if rng.random() < 0.05 and len(loads) > 1:  # one ends, and one with a new name takes its place
                ended = rng.choice(list(loads))
                router.forget(ended)
                del loads[ended]
                loads[max(loads) + 10] = 0
                assert all(ended not in owners for owners in router.owners.values())
                assert all(owner != ended for _, owner in router.evicted)
            assert len(router.owners) <= 20 and len(router.evicted) <= 20
            assert all(len(owners) <= MAX_OWNERS for owners in router.owners.values())


def test_round_robin_and_equal_loads_take_turns() -> None:
    for route in ROUTES:
        router, chosen = Router[str](route), []
        for _ in range(6):
            chosen.append(router.rank([], {"a": 0, "b": 0, "c": 0})[0])
            router.sent([], chosen[-1])
        assert chosen == ["a", "b", "c"] * 2


def found_share(router: Router[int], replicas: int, seed: int) -> float:
    """Share of the pieces of interleaved conversations that the chosen replica has computed before."""
    rng, cached = random.Random(seed), [set[tuple[int, ...]]() for _ in range(replicas)]
    chats = {chat: (0, chat) for chat in range(12)}  # all begin with the same system prompt
    found = total = 0
    running: list[int] = []
    for turn in range(12 * 6):
        chat = rng.randrange(12)
        chats[chat] = (*chats[chat], turn, turn)
        names = [chats[chat][: end + 1] for end in range(len(chats[chat]))]
        loads = {replica: running.count(replica) for replica in range(replicas)}
        chosen = router.rank(names, loads)[0]
        router.sent(names, chosen)
        running = [*running, chosen][-3:]  # of which three answers are being computed
        found += sum(name in cached[chosen] for name in names)
        total += len(names)
        cached[chosen] |= set(names)
    return found / total


def test_conversations_are_found_again_nearly_as_often_as_on_one_server() -> None:
    prefix = load = one = 0.0
    for seed in range(8):
        one += found_share(Router("load"), 1, seed)
        prefix += found_share(Router("prefix"), 4, seed)
        load += found_share(Router("load"), 4, seed)
    assert prefix >= 0.9 * one
    assert load < 0.8 * one  # so that the bound above says something


def test_a_beginning_that_everybody_sends_spreads_over_all_replicas() -> None:
    router, loads = Router[int]("prefix"), dict.fromkeys(range(4), 0)
    for request in range(200):
        names = [("system",), ("system", request), ("system", request, request)]
        chosen = router.rank(names, loads)[0]
        router.sent(names, chosen)
        loads[chosen] += 1
        assert max(loads.values()) - min(loads.values()) <= MAX_AHEAD
    assert min(loads.values()) >= 40
    assert len(router.owners[("system",)]) == 4


def test_what_a_replica_has_evicted_is_no_reason_to_wait_for_it() -> None:
    router, names = Router[str]("prefix"), ["one", "two", "three", "four"]
    router.sent(names, "a")
    for evicted, most in (([], 8), (["four"], 6), (["three", "two"], 2), (["one"], 1)):
        router.learn("a", [], evicted)
        assert [router.rank(names, {"a": load, "b": 0})[0] for load in (most, most + 1)] == ["a", "b"]
    router.learn("a", names[:2], [])
    assert router.rank(names, {"a": 4, "b": 0})[0] == "a"


def test_routers_learn_from_reports_where_the_requests_of_others_are() -> None:
    router = Router[str]("prefix")
    router.sent(["one"], "a")
    router.learn("b", ["one", "two"], ["five"])
    assert router.rank(["one", "two", "three"], {"a": 0, "b": 5})[0] == "b" and not router.evicted


def test_a_bound_request_goes_to_its_owner_whatever_the_load() -> None:
    for route in ROUTES:
        router = Router[str](route)
        router.sent(["response"], "b")
        assert router.rank(["response"], {"a": 0, "b": 1000}, is_bound=True)[0] == "b"
        assert router.rank(["response"], {"a": 0}, is_bound=True) == ["a"]  # its owner is gone


def test_recently_used_beginnings_are_kept() -> None:
    router = Router[str]("prefix", max_names=2)
    for name in ("old", "used", "used", "new"):
        router.sent([name], "b")
    router.sent([], "a")
    counts = Counter(router.rank([name], {"a": 0, "b": 1})[0] for name in ("used", "new"))
    assert counts == {"b": 2} and router.rank(["old"], {"a": 0, "b": 1})[0] == "a"
