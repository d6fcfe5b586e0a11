"""Reads traces of requests: public ones in the formats of BurstGPT, Azure LLM inference 2023 and 2024, and
Mooncake, and the JSON log of `localllm serve --log-format json`.

The format is recognized by the columns of the header, or the fields of the first line.
"""

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from localllm.errors import UsageError
from localllm.simulate.load import FIRST_OWN_ID, MAX_TOKENS, Turn

MOONCAKE_BLOCK = 512  # tokens of a hash id
FORMATS = "BurstGPT or Azure LLM inference (CSV), Mooncake or `localllm serve --log-format json` (JSON lines)"
Fields = Mapping[str, Any]
Reader = Callable[[Fields, int], Turn | None]


def read_trace(file: Path) -> tuple[str, tuple[Turn, ...]]:
    """Return the format and the requests of a trace, in order of arrival. Requests without an answer are left out.

    Raises UsageError if the file cannot be read, is in no known format, or has no requests.
    """
    try:
        with file.open(encoding="utf-8", errors="strict", newline="") as stream:
            first = stream.readline()
            lines = itertools.chain((first,), stream)
            records = json_records(lines) if first.lstrip().startswith("{") else csv.DictReader(lines)
            name, turns = read_records(file, iter(records))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", "check the path") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{file} is not a trace ({error})", f"give one of {FORMATS}") from None
    if not turns:
        raise UsageError(f"{file} has no answered requests", f"give a trace of {FORMATS}")
    turns.sort(key=lambda turn: turn.arrival)
    return name, tuple(turns)


def json_records(lines: Iterable[str]) -> Iterator[Fields]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise UsageError(f"line {number} of the trace is not a JSON object", "check how it was written")
        yield record


def read_records(file: Path, records: Iterator[Fields]) -> tuple[str, list[Turn]]:
    first = next(records, None)
    if first is None:
        raise UsageError(f"{file} is empty", f"give a trace of {FORMATS}")
    format_and_reader = next(((name, reader) for name, keys, reader in READERS if keys <= first.keys()), None)
    if format_and_reader is None:
        columns = ", ".join(str(column) for column in list(first)[:8])
        raise UsageError(f"{file} has the columns {columns}", f"give a trace of {FORMATS}")
    name, reader = format_and_reader
    turns: list[Turn] = []
    for number, record in enumerate(itertools.chain((first,), records), 1):
        try:
            turn = reader(record, FIRST_OWN_ID + 2 * number)
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"request {number} of {file} does not match its format ({error})", "correct it"
            ) from None
        if turn:
            turns.append(turn)
    return name, turns


def tokens(value: Any) -> int:
    """Return a length. Raises ValueError if it is not one."""
    length = int(value)
    if not 0 <= length <= MAX_TOKENS:
        raise ValueError(f"{length} tokens")
    return length


def make_turn(arrival: float, prompt: Any, output: Any, own_id: int) -> Turn | None:
    """Return a request with a prompt that no other shares; None without prompt or answer, as failed ones."""
    prompt_len, answer_len = tokens(prompt), tokens(output)
    return Turn(arrival, ((own_id, prompt_len),), answer_len, own_id + 1) if prompt_len and answer_len else None


def read_burstgpt(record: Fields, own_id: int) -> Turn | None:
    return make_turn(float(record["Timestamp"]), record["Request tokens"], record["Response tokens"], own_id)


def read_azure(record: Fields, own_id: int) -> Turn | None:
    text = record["TIMESTAMP"].strip()
    if "." in text:  # seven digits in 2023, which Python before 3.11 refused and later versions cut
        head, _, fraction = text.partition(".")
        digits = len(fraction) - len(fraction.lstrip("0123456789"))
        text = f"{head}.{fraction[:digits][:6].ljust(6, '0')}{fraction[digits:]}"
    at = datetime.fromisoformat(text)
    seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    return make_turn(seconds, record["ContextTokens"], record["GeneratedTokens"], own_id)


def read_mooncake(record: Fields, own_id: int) -> Turn | None:
    """Equal hash ids are equal blocks of 512 tokens; the last may be shorter, and tokens beyond are its own."""
    prompt_len, answer_len = tokens(record["input_length"]), tokens(record["output_length"])
    spans, left = list[tuple[int, int]](), prompt_len
    for hash_id in record.get("hash_ids") or ():
        if left <= 0:
            break
        spans.append((2 + int(hash_id), min(MOONCAKE_BLOCK, left)))
        left -= MOONCAKE_BLOCK
    if left > 0:
        spans.append((own_id, left))
    if not (prompt_len and answer_len):
        return None
    return Turn(float(record["timestamp"]) / 1000, tuple(spans), answer_len, own_id + 1)


def read_own_log(record: Fields, own_id: int) -> Turn | None:
    """A line of the request log is written when the answer has ended; it arrived `seconds` before."""
    if not record.get("prompt_tokens") or not record.get("output_tokens"):
        return None
    ended = datetime.fromisoformat(record["time"]).timestamp()
    return make_turn(ended - float(record["seconds"]), record["prompt_tokens"], record["output_tokens"], own_id)


READERS: tuple[tuple[str, set[str], Reader], ...] = (
    ("BurstGPT", {"Timestamp", "Request tokens", "Response tokens"}, read_burstgpt),
    ("Azure LLM inference", {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}, read_azure),
    ("Mooncake", {"timestamp", "input_length", "output_length"}, read_mooncake),
    ("localllm", {"time", "level"}, read_own_log),
)
