"""localllm beside llama.cpp (`llama-cpp-python`, built for this machine) on the same GGUF file of a generated 1.2B
Llama, with as many threads.

    python -m bench.peers [--type Q4_0] [--type Q4_K_M] [--prompt 512] [--answer 64] [--rounds 7] [--models FOLDER]
        [--save]

Each runs in a process of its own, in which nothing else runs, and waits while the other has its turn; medians are
compared as ratios. Peak memory is the largest resident set of the process, as the kernel counts it, after all
rounds: torch's own libraries included. `pss_bytes` is its memory after a round, with pages that both processes map
counted half to each. llama.cpp computes keys and values in float16, localllm in the dtype of its model. With
LOCALLLM_KEEP_LAYOUT=on, localllm maps weights that its first load, which does not count, has kept.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import gguf_checkpoint
from bench.contestants import CONTESTANTS
from bench.report import finish
from bench.rounds import Sample, medians, new_prompt, take_turns

FORMS = ["Q4_0", "Q8_0", "Q4_K_M"]
LOADS = 4
BEGINNING = ("import_s", "load_s")


class Contestant:
    def __init__(self, name: str, file: Path, threads: int):
        command = [sys.executable, "-m", "bench.contestants", name, str(file), str(threads)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.name = name
        self.process = subprocess.Popen(command, text=True, **pipes)
        self.about = self.read()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self.process.wait()}")
        return json.loads(line)

    def answer(self, prompt: list[int], count: int) -> Sample:
        assert self.process.stdin
        print(json.dumps({"prompt": prompt, "count": count}), file=self.process.stdin, flush=True)
        return self.read()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def measure(
    form: str, threads: int, prompt: int, answer: int, rounds: int, models: Path | None = None
) -> dict[str, Any]:
    """models: keep the generated file in this folder and use it again"""
    with tempfile.TemporaryDirectory() as scratch:
        file = (models or Path(scratch)) / f"{form}.gguf"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            gguf_checkpoint.make(file.with_suffix(".partial"), form)
            file.with_suffix(".partial").rename(file)
        begun: dict[str, list[Sample]] = {name: [] for name in CONTESTANTS}
        for i in range(LOADS):
            for name in CONTESTANTS:
                contestant = Contestant(name, file, threads)
                # The first finds nothing in the caches.
                begun[name] += [{key: contestant.about[key] for key in BEGINNING}] if i else []
                contestant.close()
        both = {name: Contestant(name, file, threads) for name in CONTESTANTS}

        def turn(i: int) -> dict[str, Sample]:
            order = list(both.items()) if i % 2 else list(both.items())[::-1]
            return {name: one.answer(new_prompt(i, prompt), answer) for name, one in order}

        taken = take_turns(rounds, turn)
        for one in both.values():
            one.close()
        found = {name: sample | medians(begun[name]) for name, sample in taken.items()}
        ratios = {f"{key}_ratio": value / found["llama.cpp"][key] for key, value in found["localllm"].items()}
        sizes = {"type": form, "file_bytes": file.stat().st_size, "threads": threads}
        asked = {"prompt_tokens": prompt, "output_tokens": answer, "rounds": rounds}
        told = {
            name: {k: v for k, v in one.about.items() if k not in ("load_s", "import_s")}
            for name, one in both.items()
        }
    return sizes | asked | {name: told[name] | found[name] for name in found} | ratios


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--type", action="append", choices=FORMS)
    options.add_argument("--prompt", type=int, default=512, help="tokens")
    options.add_argument("--answer", type=int, default=64, help="tokens")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--models", type=Path, help="keep the generated files in this folder and use them again")
    options.add_argument("--save", action="store_true", help="append the results to bench/results/peers.jsonl")
    chosen = options.parse_args()
    for form in chosen.type or FORMS:
        result = measure(form, chosen.threads, chosen.prompt, chosen.answer, chosen.rounds, chosen.models)
        finish("peers", result, chosen.save)


if __name__ == "__main__":
    main()
