"""Simulations of a server: streamed, limited, ended with their clients, and the command's own."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

from localllm import LLM
from localllm.cli.app import main
from localllm.cli.simulate_page import PRESETS
from localllm.errors import Busy, LocalLLMError, UsageError
from localllm.server import simulation
from localllm.server.access import AccessPolicy
from localllm.server.simulation import SimulationPool
from tests.server.conftest import serving

H100 = {"--device": "H100 SXM", "--rate": 10, "--requests": 60}
BODY = {"model": "llama3.1:8b-bf16", "options": H100}
LONG = {"model": "llama3.1:8b-bf16", "options": H100 | {"--requests": 5_000_000}}


def lines(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.title)
def test_presets_have_the_numbers_of_the_command(demo_url: str, preset: Any, capsys: Any) -> None:
    body = {"model": preset.model, "options": preset.options}
    *frames, last = lines(httpx2.post(f"{demo_url}/simulate/run", json=body, timeout=60))
    words = [word for flag, value in preset.options.items() for word in (flag, str(value))]
    outputs = []
    for form in ([], ["--json"]):
        assert main(["simulate", preset.model, *words, *form]) == 0
        outputs.append(capsys.readouterr().out)
    assert last["text"] == outputs[0].rstrip("\n")
    report = json.loads(outputs[1])
    assert {**last["report"], "wall_s": 0} == {**report, "wall_s": 0}
    assert frames[0]["command"].startswith(f"localllm simulate {preset.model} --device 'H100 SXM'")
    assert [frame["done"] for frame in frames if "t" in frame][-1] == report["requests"]


def test_options_list_models_and_presets(demo_url: str) -> None:
    found = httpx2.get(f"{demo_url}/simulate/options", timeout=60).json()
    assert found["models"][0] == "demo" and "llama3.1:70b-bf16" in found["models"]
    assert len(found["presets"]) == 7 and {"--rate", "--quant"} <= {option["flag"] for option in found["options"]}


def test_a_model_of_this_machine(demo_url: str) -> None:
    options = {"--device": "h100", "--rate": 50, "--requests": 40}
    *_, last = lines(
        httpx2.post(f"{demo_url}/simulate/run", json={"model": "demo", "options": options}, timeout=60)
    )
    assert last["report"]["model"] == "demo" and last["report"]["requests"] == 40


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "/etc/passwd"}, 404, "is a path"),
        ({"model": "./demo"}, 404, "is a path"),
        ({"model": "~/demo"}, 404, "is a path"),
        ({"model": "--help"}, 400, "is not a name of a model"),
        ({"model": "nonexistent"}, 404, "no model is called nonexistent"),
        ({"model": "demo", "options": {}}, 400, "the load is ambiguous"),
        ({"model": "demo", "options": {"--plot": "/tmp/x.png"}}, 400, "--plot is not an option"),
        ({"model": "demo", "options": {"--rate": [1]}}, 400, "options"),
        ({"model": "demo", "options": {"--slo": "x" * 300}}, 400, "an option is too long"),
        ({"model": "llama3.1:70b-bf16", "options": H100}, 507, "need 141 GB"),
    ],
)
def test_refusals(demo_url: str, body: dict[str, Any], status: int, message: str) -> None:
    answer = httpx2.post(f"{demo_url}/simulate/run", json=body, timeout=60)
    assert answer.status_code == status and message in answer.json()["error"]["message"]


def test_a_key_is_needed_for_all_but_the_page(demo: LLM) -> None:
    key = "k" * 32
    policy = AccessPolicy(keys=frozenset([hashlib.sha256(key.encode()).digest()]))
    with serving(demo, policy) as url:
        assert httpx2.get(f"{url}/simulate").status_code == 200
        assert httpx2.get(f"{url}/simulate/options").status_code == 401
        body = {"model": "./demo"}  # refused before a process starts
        assert httpx2.post(f"{url}/simulate/run", json=body).status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx2.post(f"{url}/simulate/run", json=body, headers=headers).status_code == 404


@contextmanager
def long_simulation(url: str) -> Iterator[None]:
    """Read the first frames of a simulation that takes minutes, and leave at the end."""
    with httpx2.stream("POST", f"{url}/simulate/run", json=LONG, timeout=60) as answer:
        read = answer.iter_lines()
        assert "command" in json.loads(next(read)) and "t" in json.loads(next(read))
        yield


@pytest.mark.slow
def test_two_at_a_time_and_none_after_their_clients_leave(demo_url: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(simulation, "SLOT_TIMEOUT_S", 0.2)
    with long_simulation(demo_url), long_simulation(demo_url):
        refused = httpx2.post(f"{demo_url}/simulate/run", json=BODY, timeout=60)
        assert refused.status_code == 503 and refused.headers["retry-after"] == "2"
        assert "2 simulations are running" in refused.json()["error"]["message"]
        # The event loop and the engine are free.
        assert httpx2.get(f"{demo_url}/health", timeout=60).status_code == 200
        answer = {"model": "demo", "prompt": "Once", "max_tokens": 3}
        assert httpx2.post(f"{demo_url}/v1/completions", json=answer, timeout=60).status_code == 200
    monkeypatch.setattr(simulation, "SLOT_TIMEOUT_S", 60.0)
    for _ in range(2):  # both processes noticed
        assert (
            lines(httpx2.post(f"{demo_url}/simulate/run", json=BODY, timeout=60))[-1]["report"]["requests"] == 60
        )


Run = Callable[[Callable[[SimulationPool], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture(scope="module")
def run_in_pool() -> Iterator[Run]:
    """Run a coroutine function with the pool whose processes all tests share."""
    with asyncio.Runner() as runner:
        pool = SimulationPool({})
        try:
            yield lambda work: runner.run(work(pool))
        finally:
            runner.run(pool.close())


REQUEST = {"run": BODY | {"source": BODY["model"]}}
ENDLESS = {"run": LONG | {"source": LONG["model"]}}


@pytest.mark.slow
def test_a_simulation_that_takes_too_long_is_ended(run_in_pool: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr(simulation, "RUN_LIMIT_S", 6.0)

    async def work(pool: SimulationPool) -> list[dict[str, Any]]:
        await pool.describe()
        return [json.loads(line) async for line in pool.lines(ENDLESS)]

    found = run_in_pool(work)
    assert "takes longer than 6 s" in found[-1]["error"]["message"] and "t" in found[-2]


def test_the_process_is_used_again_after_a_cancelled_run(
    run_in_pool: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "CANCEL_LIMIT_S", 60.0)  # whatever else the machine does

    async def work(pool: SimulationPool) -> tuple[int, int, bytes]:
        numbers = []
        for _ in range(2):
            stream = pool.lines(ENDLESS)
            async for _ in stream:
                break
            await stream.aclose()
            await asyncio.gather(*pool.tasks)
            numbers.append(pool.idle[-1].process.pid)
        return *numbers, [line async for line in pool.lines(REQUEST)][-1]

    first, second, last = run_in_pool(work)
    assert first == second and json.loads(last)["report"]["requests"] == 60


def test_a_killed_process_is_an_error_and_replaced(run_in_pool: Run) -> None:
    async def work(pool: SimulationPool) -> bytes:
        stream = pool.lines(ENDLESS)
        async with pool.process() as process:
            pool.idle.append(process)
            await anext(stream)
            process.process.kill()
            with pytest.raises(LocalLLMError, match="has ended"):
                async for _ in stream:
                    pass
        await asyncio.gather(*pool.tasks)
        assert process not in pool.idle
        return [line async for line in pool.lines(REQUEST)][-1]

    assert json.loads(run_in_pool(work))["report"]["requests"] == 60


def test_a_simulation_without_memory_is_an_error(run_in_pool: Run) -> None:
    huge = BODY | {"options": H100 | {"--turns": 2, "--cache-tokens": 2**40}}

    async def work(pool: SimulationPool) -> bytes:
        return [line async for line in pool.lines({"run": huge | {"source": huge["model"]}})][-1]

    assert "takes more than 4 GiB" in json.loads(run_in_pool(work))["error"]["message"]


def test_busy_and_usage_errors_keep_their_class(run_in_pool: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr(simulation, "SLOT_TIMEOUT_S", 0.05)

    async def work(pool: SimulationPool) -> None:
        with pytest.raises(UsageError, match="the load is ambiguous"):
            await anext(pool.lines({"run": {"model": "demo", "source": "demo", "options": {}}}))
        async with pool.process():
            await pool.slots.acquire()  # as if another simulation ran
            with pytest.raises(Busy):
                await anext(pool.lines(REQUEST))
            pool.slots.release()

    run_in_pool(work)


def test_an_idle_process_ends(run_in_pool: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr(simulation, "IDLE_LIMIT_S", 0.1)

    async def work(pool: SimulationPool) -> None:
        async with pool.process() as process:
            pass
        await asyncio.gather(*pool.tasks)
        await asyncio.wait_for(process.process.wait(), 60)
        assert process not in pool.idle

    run_in_pool(work)
