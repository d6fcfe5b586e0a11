"""Traces in the public formats, written by hand with their published columns."""

import json
from pathlib import Path

import pytest

from localllm.errors import UsageError
from localllm.simulate.load import LoadPlan
from localllm.simulate.simulation import EngineSetup, simulate
from localllm.simulate.traces import read_trace
from tests.simulate.engines import LinearCost

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
45,ChatGPT,1087,230,1317,Conversation log
5,ChatGPT,472,18,490,Conversation log
118,GPT-4,417,0,417,API log
"""
BURSTGPT_2 = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
0,7,1.5,GPT-4,100,10,110,Conversation log
"""
AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1200, "output_length": 52, "hash_ids": [0, 1, 2]}
{"timestamp": 3052, "input_length": 1030, "output_length": 26, "hash_ids": [0, 1, 9]}
"""
MOONCAKE_2 = """{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1, 2, 3]}

{"timestamp": 5000, "input_length": 600, "output_length": 0}
"""
OWN_LOG = "\n".join(
    json.dumps({"time": f"2026-11-24T10:00:{seconds}+00:00", "level": "info", **fields})
    for seconds, fields in (
        ("00.500", {"event": "loaded", "model": "demo"}),
        ("04.500", {"event": "request", "seconds": 2.5, "prompt_tokens": 20, "output_tokens": 30}),
        ("04.900", {"event": "request", "seconds": 3.9, "prompt_tokens": 7, "output_tokens": 9}),
    )
)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (BURSTGPT, "BurstGPT", [(0.0, 472, 18), (40.0, 1087, 230)]),
        (BURSTGPT_2, "BurstGPT", [(0.0, 100, 10)]),
        (AZURE_2023, "Azure LLM inference", [(0.0, 374, 44), (4.314579, 396, 109)]),
        (AZURE_2024, "Azure LLM inference", [(0.0, 2162, 5), (0.99007, 2399, 6)]),
        (MOONCAKE, "Mooncake", [(0.0, 1200, 52), (3.052, 1030, 26)]),
        (MOONCAKE_2, "Mooncake", [(0.0, 600, 1)]),
        (OWN_LOG, "localllm", [(0.0, 7, 9), (1.0, 20, 30)]),
    ],
)
def test_formats(tmp_path: Path, text: str, name: str, expected: list[tuple[float, int, int]]) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    found, turns = read_trace(file)
    start = turns[0].arrival
    assert found == name
    assert [(t.prompt_len, t.answer_len) for t in turns] == [(prompt, output) for _, prompt, output in expected]
    assert [t.arrival - start for t in turns] == pytest.approx([at for at, _, _ in expected], abs=1e-6)


def test_hash_ids_share_prefixes(tmp_path: Path) -> None:
    """Two blocks of 512 tokens are equal in both requests, and no other is."""
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)
    _, turns = read_trace(file)
    setup = EngineSetup(1000, 16, 512, 8, 4096, asynchronous=False)
    plan = LoadPlan(trace=turns)
    simulated = simulate(plan, setup, LinearCost())
    assert simulated.cached_tokens == 1024 == list(simulated.records.cached)[1]


def test_speed(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(BURSTGPT)
    _, turns = read_trace(file)
    load = LoadPlan(trace=turns, speed=10).start()
    assert [load.pop().arrival, load.pop().arrival] == [0.0, 4.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "has the columns a, b"),
        ("Timestamp,Request tokens,Response tokens\nsoon,1,2\n", "request 1 of"),
        ("Timestamp,Request tokens,Response tokens\n1,-1,2\n", "request 1 of"),
        ("Timestamp,Request tokens,Response tokens\n1,5,0\n", "has no answered requests"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 2}\n[]\n', "line 2 of the trace"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 2}\n{"timest\n', "line 2 of the trace"),
        ('{"other": 0}\n', "has the columns other"),
    ],
)
def test_invalid_traces(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_trace(file)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="is not a trace"):
        read_trace(file)
