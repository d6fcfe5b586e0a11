"""Reads thousands of mutated files in a process with limited memory and time.

Run as a program: `python -m tests.checkpoint.mutations gguf|safetensors COUNT SEED FILE`. Prints one JSON line.
Every case has its own seed, `SEED + number`, so that failures are reproducible.
"""

import json
import random
import resource
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from localllm.arch.describe import parse_config
from localllm.checkpoint.gguf.header import read_gguf
from localllm.checkpoint.header import read_header
from localllm.errors import LocalLLMError

EXTRA_MEMORY = 256 * 2**20  # bytes above what the interpreter has when it starts
LONGEST = 1.0  # seconds of computing a case
ODD = [0, 1, 2, 7, 8, 31, 32, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
WORDS = [b"null", b"-1", b"1e999", b"[]", b"{}", b'""', b"9" * 40, b"true", b"[[", b'"\\ud800"', b"0.5", b"NaN"]


def mutate(content: bytes, header: int, draw: random.Random) -> bytes:
    """A few changes within the first `header` bytes."""
    raw = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        at = draw.randrange(min(header, len(raw)) or 1)
        match draw.randrange(9):
            case 0:
                raw[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                raw[at : at + 1] = bytes([(raw[at] if at < len(raw) else 0) ^ 1 << draw.randrange(8)])
            case 2:
                raw[at : at + 8] = struct.pack("<Q", draw.choice(ODD))
            case 3:
                raw[at : at + 4] = struct.pack("<I", draw.choice(ODD) & 0xFFFFFFFF)
            case 4:
                del raw[at : at + draw.randrange(1, 40)]
            case 5:
                raw[at:at] = draw.randbytes(draw.randrange(1, 40))
            case 6:  # a piece of the header once more
                raw[at:at] = raw[draw.randrange(len(raw)) :][: draw.randrange(1, 80)]
            case 7:
                del raw[at:]
                raw = raw or bytearray(1)
            case 8:
                raw[at : at + draw.randrange(12)] = draw.choice(WORDS)
    return bytes(raw)


def open_gguf(file: Path) -> None:
    header = read_gguf(file)
    size = file.stat().st_size
    for tensor in header.tensors.values():
        if not 0 < tensor.offset <= tensor.offset + tensor.nbytes <= size:
            raise AssertionError(f"{tensor} lies outside the file of {size} bytes")
    parse_config(read_header(file).config)


def open_safetensors(file: Path) -> None:
    header = read_header(file.parent)
    if header.stored_bytes > file.stat().st_size:
        raise AssertionError(f"tensors of {header.stored_bytes} bytes in a file of {file.stat().st_size}")
    parse_config(header.config)


def too_long(*_: object) -> None:
    raise TimeoutError(f"longer than {LONGEST} s")


def run(reader: Callable[[Path], None], file: Path, count: int, first_seed: int) -> dict[str, object]:
    whole = file.read_bytes()
    if reader is open_safetensors:
        header = int.from_bytes(whole[:8], "little") + 8
    else:
        header = min(tensor.offset for tensor in read_gguf(file).tensors.values())
    ends, failures, slowest = Counter[str](), [], 0.0
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, used + EXTRA_MEMORY))
    signal.signal(signal.SIGPROF, too_long)
    for seed in range(first_seed, first_seed + count):
        file.write_bytes(mutate(whole, header, random.Random(seed)))
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, LONGEST)
        try:
            reader(file)
            ends["read"] += 1
        except LocalLLMError as error:
            ends[type(error).__name__] += 1
            if "\n" in str(error) or not error.remedy:
                failures.append((seed, f"unclear: {error}"))
        except BaseException as error:  # a panic of a Rust library is no Exception
            failures.append((seed, repr(error)))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, time.process_time() - start)
    return {"ends": ends, "failures": failures[:20], "slowest_s": slowest}


if __name__ == "__main__":
    kind, count, seed, path = sys.argv[1:]
    reader = {"gguf": open_gguf, "safetensors": open_safetensors}[kind]
    print(json.dumps(run(reader, Path(path), int(count), int(seed))))
