"""Slots of llama.cpp's server, used as its clients do: saved, restored after a restart, and erased."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import localllm
from localllm import LLM
from localllm.llm.slots import SlotTable
from localllm.request import Request, SamplingParams
from localllm.server.access import AccessPolicy, key_digest
from localllm.server.slots import SlotFiles
from tests.models.families import FAMILIES
from tests.server.conftest import serving
from tests.text.grammar.conftest import DEMO
from tests.tiny import make_checkpoint

PROMPT = "Once upon a time there was a little fox who lived in the green forest. " * 6
KEYS = ("first-key-of-sixteen", "second-key-of-sixteen")


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Yield the URL of `localllm serve demo` with slots."""
    command = [sys.executable, "-m", "localllm", "serve", "demo", "--port", "0", "--slot-save-path", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        try:
            yield process.stderr.readline().removeprefix("listening on ").strip()
        finally:
            process.send_signal(signal.SIGTERM)
            process.stderr.read()
            assert process.wait(30) == 0


def complete(url: str, prompt: Any = PROMPT, key: str = "", **body: Any) -> Any:
    body = {"prompt": prompt, "n_predict": 8, "temperature": 0, "return_tokens": True, **body}
    answer = httpx2.post(f"{url}/completion", json=body, headers=bearer(key), timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def act(url: str, action: str, slot: object = 0, status: int = 200, key: str = "", **body: Any) -> Any:
    answer = httpx2.post(
        f"{url}/slots/{slot}", params={"action": action}, json=body, headers=bearer(key), timeout=60
    )
    assert answer.status_code == status, answer.text
    return answer.json()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def cached(answer: Any) -> int:
    return answer["timings"]["cache_n"]


@pytest.fixture
def llm() -> Iterator[LLM]:
    with localllm.load("demo") as llm:
        yield llm


@pytest.mark.slow
def test_a_slot_survives_a_restart(llm: LLM, tmp_path: Path) -> None:
    """The second server is another process."""
    with serving(llm, slot_files=SlotFiles(tmp_path / "slots")) as url:
        first = complete(url)
        assert first["id_slot"] == 0 and cached(first) == 0
        expected = complete(url, PROMPT + first["content"])
        saved = act(url, "save", filename="fox.bin")
        file = tmp_path / "slots" / "fox.bin"
        assert saved["id_slot"] == 0 and saved["filename"] == "fox.bin" and saved["timings"]["save_ms"] > 0
        assert saved["n_written"] == file.stat().st_size and file.stat().st_mode & 0o777 == 0o600
        tokens = expected["tokens_evaluated"] + 8
        assert tokens - 17 <= saved["n_saved"] <= tokens
    with serve(tmp_path / "slots") as url:
        restored = act(url, "restore", slot=3, filename="fox.bin")
        assert restored["n_restored"] == saved["n_saved"] and restored["n_read"] == saved["n_written"]
        assert restored["id_slot"] == 3 and restored["timings"]["restore_ms"] > 0
        [slot] = httpx2.get(f"{url}/slots").json()
        assert slot["id"] == 3 and slot["n_prompt_tokens"] == saved["n_saved"] and not slot["is_processing"]
        again = complete(url, PROMPT + first["content"])
        assert cached(again) >= expected["tokens_evaluated"] - 16
        assert again["tokens"] == expected["tokens"]


def test_a_hybrid_is_restored_to_its_last_state(tmp_path: Path) -> None:
    kind, changes = FAMILIES["Qwen3.5"]
    make_checkpoint(tmp_path / "model", kind, **changes | {"vocab_size": 3072, "max_position_embeddings": 1024})
    shutil.copy(DEMO / "tokenizer.json", tmp_path / "model")
    files, prompt = SlotFiles(tmp_path / "slots"), [3 + i % 90 for i in range(400)]
    with localllm.load(tmp_path / "model", device="cpu") as llm, serving(llm, slot_files=files) as url:
        expected = complete(url, prompt)
        saved = act(url, "save", filename="a")
    with localllm.load(tmp_path / "model", device="cpu") as llm, serving(llm, slot_files=files) as url:
        assert act(url, "restore", filename="a")["n_restored"] == saved["n_saved"] > 0
        again = complete(url, prompt + expected["tokens"][:1])
        assert cached(again) > 0 and again["tokens"][:7] == expected["tokens"][1:]


def test_an_erased_slot_is_computed_again(llm: LLM, tmp_path: Path) -> None:
    other = (
        "Once upon a time there was a little fox who lived in the green forest. " * 4 + "Then he met a bear. " * 6
    )
    with serving(llm, slot_files=SlotFiles(tmp_path)) as url:
        first = complete(url, id_slot=1)
        shared = cached(complete(url, other, id_slot=2))
        assert shared > 16 and cached(complete(url, id_slot=1)) > shared
        erased = act(url, "erase", slot=1)
        assert erased == {"id_slot": 1, "n_erased": first["tokens_evaluated"] + 8}
        assert act(url, "erase", slot=1)["n_erased"] == 0
        assert shared <= cached(complete(url, other, id_slot=2))
        assert cached(complete(url, id_slot=1)) == shared
        assert [slot["id"] for slot in httpx2.get(f"{url}/slots").json()] == [1, 2]


def test_errors_name_what_to_send(llm: LLM, tmp_path: Path, demo_url: str) -> None:
    refused = act(demo_url, "save", status=501, filename="a")
    assert "--slot-save-path" in refused["error"]["message"]
    with serving(llm, slot_files=SlotFiles(tmp_path)) as url:
        assert act(url, "save", filename="empty")["n_saved"] == 0
        assert act(url, "restore", filename="empty")["n_restored"] == 0
        for name in ("../a", "/etc/passwd", "a/b", "..", ".hidden", "", "a\\b", "a\0b", "x" * 300):
            assert act(url, "save", status=400, filename=name)["error"]["param"] == "filename"
        assert "model" not in act(url, "save", status=400)["error"]["param"]
        assert "there is no saved slot" in act(url, "restore", status=400, filename="b")["error"]["message"]
        assert act(url, "move", status=400, filename="a")["error"]["param"] == "action"
        for number in ("-1", "256", "x"):
            assert act(url, "save", number, status=400, filename="a")["error"]["param"] == "id_slot"
        assert sorted(file.name for file in tmp_path.iterdir()) == ["empty"]


def test_damaged_and_foreign_files_are_refused(llm: LLM, tmp_path: Path) -> None:
    with serving(llm, slot_files=SlotFiles(tmp_path)) as url:
        complete(url)
        act(url, "save", filename="a")
        content = (tmp_path / "a").read_bytes()
        damaged = {
            "short": content[:-1],
            "flipped": content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
            "text": b"This is no slot, but a text of some length.",
            "twice": content + content,
            "foreign": content.replace(b"bfloat16", b"bfloat61"),
            "huge": (2**40).to_bytes(8, "little") + content[8:],
        }
        for name, changed in damaged.items():
            (tmp_path / name).write_bytes(changed)
            message = act(url, "restore", status=400, filename=name)["error"]["message"]
            assert "the state cannot be used" in message, (name, message)
        os.symlink(tmp_path / "a", tmp_path / "link")
        act(url, "restore", status=400, filename="link")
        assert complete(url)["tokens_predicted"] == 8
    with localllm.load("demo", kv_dtype="int8") as other, serving(other, slot_files=SlotFiles(tmp_path)) as url:
        assert "--kv-dtype" in act(url, "restore", status=400, filename="a")["error"]["message"]
    with localllm.load("demo", context=64) as other, serving(other, slot_files=SlotFiles(tmp_path)) as url:
        content = act(url, "restore", status=400, filename="a")["error"]
        assert "context" in content["message"]


@pytest.mark.parametrize("shares_cache", [False, True])
def test_keys_have_slots_of_their_own(llm: LLM, tmp_path: Path, shares_cache: bool) -> None:
    access = AccessPolicy(keys=frozenset(map(key_digest, KEYS)), shares_cache=shares_cache)
    with serving(llm, access, slot_files=SlotFiles(tmp_path)) as url:
        complete(url, key=KEYS[0])
        assert act(url, "save", key=KEYS[0], filename="a")["n_saved"] > 0
        assert act(url, "save", key=KEYS[1], filename="b")["n_saved"] == 0
        for action in ("save", "restore"):
            refused = act(url, action, status=400, key=KEYS[1], filename="a")
            assert "API key" in refused["error"]["message"]
        assert act(url, "erase", key=KEYS[1])["n_erased"] == 0
        [slot] = httpx2.get(f"{url}/slots", headers=bearer(KEYS[1])).json()
        assert slot["n_prompt_tokens"] == 0


def test_the_lowest_idle_slot_is_used() -> None:
    table = SlotTable()

    def begin(slot: int | None = None, client: str = "") -> Request:
        request = Request((1, 2), SamplingParams(), 0.0, slot=slot, client=client)
        table.begin(request, request.prompt_ids)
        return request

    first, second, third = begin(), begin(), begin(client="key")
    assert [table.number_of(each) for each in (first, second, third)] == [0, 1, 0]
    table.end(first)
    assert table.number_of(begin()) == 0
    assert table.number_of(begin(2)) == 2
    assert table.number_of(begin()) == 3
    table.end(second)
    assert table.remember("", None, [5]) == 1
    assert table.number_of(begin()) == 1
    many = [begin() for _ in range(300)]
    assert max(map(table.number_of, many)) == 303
    for each in many:
        table.end(each)
    assert len(table.of_client("")) == 256
