"""`localllm bench --against URL`: a load on servers that run already."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.cli import io
from localllm.cli.progress import status_line
from localllm.errors import UsageError
from localllm.formatting import format_columns, format_table

LOAD_TEST_FLAGS = {
    "api": "--api",
    "concurrency": "--concurrency",
    "rate": "--rate",
    "requests": "--requests",
    "duration": "--duration",
    "slo": "--slo",
    "shared_prefix": "--shared-prefix",
    "ignore_eos": "--ignore-eos",
    "timeout": "--timeout",
}
LOCAL_BENCH_FLAGS = {
    "compare": "--compare",
    "depth": "--depth",
    "batch": "--batch",
    "quant": "--quant",
    "draft": "--draft",
    "plot": "--plot",
    "device": "--device",
    "dtype": "--dtype",
    "kv_dtype": "--kv-dtype",
}


def refuse_flags(flags: Mapping[str, Any], names: Mapping[str, str], why: str) -> None:
    """Raises UsageError where one of these flags was given."""
    for name, flag in names.items():
        if flags.get(name) not in (None, False):
            raise UsageError(f"{flag} {why}", "leave one of them out")


def run_load_test(
    urls: Sequence[str], models: Sequence[str], flags: Mapping[str, Any], out: io.StdoutWriter
) -> None:
    """Measure and print. Raises KeyboardInterrupt where it was broken off, after what was measured until then."""
    refuse_flags(flags, LOCAL_BENCH_FLAGS, "is for models that are loaded here, --against for servers")
    if len(models) > 1:
        raise UsageError(f"{len(models)} models are named", "name one at most, as the servers call it")
    from localllm.benchmark.load import report as load_report
    from localllm.benchmark.load.client import normalize_url
    from localllm.benchmark.load.drive import Load
    from localllm.benchmark.load.run import LoadPlan, measure_servers
    from localllm.benchmark.load.slo import LatencyObjective
    from localllm.benchmark.load.wire import SERVER_APIS

    if flags["api"] not in (None, *SERVER_APIS):
        raise UsageError(f"--api is {flags['api']!r}", f"give one of {', '.join(SERVER_APIS)}")
    if flags["rate"] is not None and flags["concurrency"] is not None:
        raise UsageError("--rate lets requests come by themselves, --concurrency one after the other", "give one")
    requests, duration = flags["requests"], flags["duration"]
    given = {
        "prompt": _parse_int(flags["prompt"], "--prompt"),
        "output": _parse_int(flags["output"], "--output"),
        "rounds": flags["repeat"],
        "shared_prefix": flags["shared_prefix"],
        "timeout_s": flags["timeout"],
        "objective": flags["slo"] and LatencyObjective.parse(flags["slo"]),
        "text": flags["text"] and _read_words(flags["text"]),
    }
    plan = LoadPlan(
        Load(
            32 if requests is None and duration is None else requests,
            duration,
            1 if flags["concurrency"] is None else flags["concurrency"],
            flags["rate"],
        ),
        seed=flags["seed"],
        ignore_eos=flags["ignore_eos"],
        **{name: value for name, value in given.items() if value is not None},
    )
    with status_line() as say:
        result = measure_servers(
            plan, [normalize_url(url) for url in urls], flags["api"], next(iter(models), None), say
        )
    if flags["as_json"]:
        out.write(json.dumps(load_report.as_dict(result), indent=1, allow_nan=False) + "\n")
    elif flags["as_csv"] or flags["as_markdown"]:
        out.write((load_report.as_csv if flags["as_csv"] else load_report.as_markdown)(result))
    else:
        blocks = [format_columns(load_report.result_facts(result)), format_table(load_report.table_rows(result))]
        out.write(
            "\n\n".join([*blocks, *(["\n".join(said)] if (said := load_report.result_notes(result)) else [])])
            + "\n"
        )
    if not result.complete:
        raise KeyboardInterrupt


def _parse_int(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise UsageError(f"{flag} is {text!r}", "with --against, give one whole number")
    return int(text)


def _read_words(file: str) -> list[str]:
    words = io.read_text(file).split()
    if not words:
        raise UsageError(f"{io.display_name(file)} holds no words", "give another text")
    return words
