"""Time to the first token of the first question after `localllm run MODEL --plain --resume last`, with the keys
and values of the conversation on the disk and without them (LOCALLLM_CACHE=off), with the generated 1.2B model.

`python -m bench.resume --prompt 7000 --answer 16 --rounds 3`. The conversation has one question of that many
tokens. It is held once, in a process of its own; every round resumes it in a terminal of its own, in turns.
`--model` names a folder in which the model is kept for the next run.
"""

import os
import pty
import re
import select
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tokenizers

from bench.rounds import run

TEMPLATE = "{% for message in messages %}t{{ loop.index }} {{ message.content }} {% endfor %}"
QUESTION = "t5 t6 t7\r"
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
TTFT = re.compile(r"TTFT\s+([0-9.]+) (s|ms|µs)")
TIMEOUT_S = 1800


def add_chat_template(model: Path, folder: Path) -> None:
    """Make a folder with the model's weights, a chat template, and a tokenizer of words t0, t1 and so on."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).symlink_to((model / name).absolute())
    words = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def hold_conversation(model: Path, home: Path, prompt_len: int, answer_len: int) -> float:
    """Ask a question of that length, save the conversation as the app does, and return the TTFT."""
    import localllm
    from localllm.conversation.chat import Chat
    from localllm.conversation.session import Session
    from localllm.request import SamplingParams
    from localllm.settings import DiskCache, Settings

    cache = DiskCache(home / "kv-cache", kept_only=True)
    settings = Settings(home=home, device="cpu", dtype="auto", threads=None, disk_cache=cache)
    with localllm.load(model, settings=settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=answer_len)
        session = Session(llm, Chat(llm, params, None, {}), home / "chats", False)
        question = " ".join(f"t{7919 * i % 20_000 + 300}" for i in range(prompt_len))
        metrics = [event.metrics for event in session.ask(question) if event.metrics]
        session.save()
    return metrics[-1].ttft_s


def resume(model: Path, home: Path, cache: str) -> float:
    """Resume the conversation with the command line, ask a short question, and return the TTFT that it prints."""
    command = [sys.executable, "-m", "localllm", "run", str(model), "--plain", "--resume", "last", "--verbose"]
    process, terminal = pty.fork()
    if process == 0:
        os.environ |= {"LOCALLLM_HOME": str(home), "LOCALLLM_CACHE": cache, "TERM": "dumb"}
        os.execv(sys.executable, [*command, "--max-tokens", "8", "--temperature", "0"])
    seen, asked, deadline = "", False, time.monotonic() + TIMEOUT_S
    try:
        while not (found := TTFT.search(seen)):
            if not select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(seen[-2000:])
            try:
                seen += os.read(terminal, 65536).decode(errors="replace")
            except OSError:
                raise RuntimeError(f"the command has ended: {seen[-2000:]}") from None
            if not asked and ">>> " in seen:
                asked = True
                os.write(terminal, QUESTION.encode())
        return float(found[1]) * UNITS[found[2]]
    finally:
        with suppress(OSError):
            os.write(terminal, b"\x04")  # ends the command
        os.close(terminal)
        os.waitpid(process, 0)


def measure(model: Path, prompt_len: int, answer_len: int, rounds: int) -> dict[str, Any]:
    samples: dict[str, list[float]] = {"off": [], "on": []}
    with tempfile.TemporaryDirectory(dir=model) as scratch:
        named, home = Path(scratch) / "model", Path(scratch) / "home"
        named.mkdir()
        add_chat_template(model, named)
        with ProcessPoolExecutor(1, get_context("spawn")) as executor:
            first = executor.submit(hold_conversation, named, home, prompt_len, answer_len).result()
        size = sum(file.stat().st_size for file in (home / "kv-cache").iterdir())
        for _ in range(rounds):
            for cache, times in samples.items():
                copy = Path(scratch) / "copy"  # since resuming changes the conversation
                shutil.copytree(home, copy)
                times.append(resume(named, copy, cache))
                shutil.rmtree(copy)
    computed, resumed = (statistics.median(times) for times in samples.values())
    return {
        "prompt_tokens": prompt_len,
        "stored_bytes": size,
        "first_ttft_s": first,
        "computed_ttft_s": computed,
        "resumed_ttft_s": resumed,
        "speedup": computed / resumed,
        "samples": samples,
    }


if __name__ == "__main__":
    run("resume", __doc__, measure)
