"""`localllm serve --prefill 1 --decode 2` as a user runs it: two replicas on Ray that share a process for prompts.

One server is started for the file; the last test ends it. The same without Ray: tests/disaggregation.
"""

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import psutil
import pytest

import localllm
from localllm.disaggregation.supervisor import MODULE
from localllm.request import SamplingParams
from tests.cluster.test_replicas import START_S, Running, complete, serving, wait_for
from tests.disaggregation.test_processes import TEXT

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

BYTES, CONNECTED, WANTED = "kv_prefill_to_decode_bytes_total", "prefill_processes", "prefill_processes_wanted"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    flags = ("--prefill", "1", "--decode", "2", "--force", "--deterministic", "--device", "cpu")
    with serving(tmp_path_factory.mktemp("decode"), "demo", *flags) as running:
        yield running


def prefill_processes(server: Running) -> list[psutil.Process]:
    found = list[psutil.Process]()
    for process in server.family():
        with suppress(psutil.Error):
            if MODULE in process.cmdline():
                found.append(process)
    return found


def values(server: Running, name: str) -> list[float]:
    """The value of a metric in each replica."""
    with server.client() as client:
        text = client.get("/metrics").text
    return [float(value) for value in re.findall(rf"^localllm_{name}\{{.*}} (\S+)$", text, re.MULTILINE)]


def complete_all(server: Running, prompts: list[str]) -> list[str]:
    with server.client() as client, ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(complete, client, prompt, max_tokens=16) for prompt in prompts]
        return [answer.result()["choices"][0]["text"] for answer in answers]


def test_two_engines_answer_as_one(server: Running) -> None:
    prompts = [f"Number {number}. {TEXT}" for number in range(12)]
    with closing(localllm.load("demo", device="cpu", deterministic=True)) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=16)
        expected = [llm.generate(prompt, greedy).text for prompt in prompts]
    assert complete_all(server, prompts) == expected
    assert min(values(server, BYTES)) > 0 and len(values(server, BYTES)) == 2
    assert values(server, CONNECTED) == values(server, WANTED) == [1, 1]
    assert len(prefill_processes(server)) == 1


def test_a_killed_process_for_prompts_is_started_again(server: Running) -> None:
    [victim] = prefill_processes(server)
    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(complete_all, server, [f"Killed {number}. {TEXT}" for number in range(12)])
        victim.kill()
        assert all(answers.result())
    wait_for(lambda: values(server, CONNECTED) == [1, 1] and prefill_processes(server) not in ([], [victim]))
    assert "prefill process 1 has ended (signal 9, SIGKILL)" in server.log.read_text()
    before = sum(values(server, BYTES))
    assert complete_all(server, [f"After {number}. {TEXT}" for number in range(4)])
    assert sum(values(server, BYTES)) > before


def test_a_killed_engine_comes_back_to_the_same_process(server: Running) -> None:
    prefill = prefill_processes(server)
    server.replicas()[0].kill()
    assert all(complete_all(server, [f"Lost {number}. {TEXT}" for number in range(12)]))
    wait_for(lambda: len(server.state()) == 2 and values(server, CONNECTED) == [1, 1], START_S)
    assert prefill_processes(server) == prefill
    with server.client() as client:
        assert client.get("/health").json()["replicas"] == 2


def test_sigkill_of_the_front_ends_the_process_for_prompts(server: Running) -> None:
    family, prefill = server.family(), prefill_processes(server)
    assert prefill
    server.process.send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(family[1:], 120)
    assert not left
