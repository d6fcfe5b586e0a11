"""What a person reads of a benchmark. No line over 100 characters unless a name is that long."""

from localllm.benchmark.report import with_spread
from localllm.benchmark.result import Edition, Result
from localllm.benchmark.roofline import Roofline
from localllm.benchmark.summary import Summary
from localllm.columns import columns, table
from localllm.units import count, operations, seconds, size

Rows = list[tuple[str, ...]]


def page(result: Result) -> str:
    """The whole page, without a line break at its end."""
    blocks = [_where(result), *map(_edition, result.editions)]
    if result.compared:
        blocks.append(_compared(result))
    if result.warnings:
        blocks.append("\n".join(f"warning: {warning}" for warning in result.warnings))
    return "\n\n".join(blocks)


def _where(result: Result) -> str:
    machine, noise = result.machine, result.noise
    versions = "  ".join(f"{name} {version}" for name, version in machine.versions.items())
    load = "" if noise.load_average is None else f"load average {noise.load_average:.2f} before, "
    drafts = "with drafts" if result.drafts else "without drafts"
    rounds = "1 round" if result.rounds == 1 else f"{result.rounds} rounds"
    return columns(
        [
            ("date", result.date),
            ("processor", f"{machine.processor}, {machine.cores:g} cores, {machine.instructions}"),
            ("versions", versions + (f", commit {machine.commit}" if machine.commit else "")),
            ("measured", f"{rounds} after one to warm up, greedy, {drafts}, prompts of {result.prompts}"),
            ("noise", f"{load}others took {noise.others:.0%} of the processors, the host {noise.stolen:.0%}"),
        ]
    )


def _edition(edition: Edition) -> str:
    loaded, roofs = edition.loaded, edition.ceilings
    kept = f", keys and values in {loaded.kv_dtype}" if loaded.kv_dtype != loaded.dtype else ""
    threads = (
        "" if loaded.threads is None else f", {loaded.threads} threads" if loaded.threads > 1 else ", 1 thread"
    )
    forms = ", ".join(f"{name} {size(taken)}" for name, taken in loaded.formats.items())
    peak = "" if edition.peak_bytes is None else f", {size(edition.peak_bytes)} at most"
    facts = columns(
        [
            ("model", f"{loaded.name}, {count(loaded.parameters)} parameters"),
            ("stored as", forms),
            ("runs on", f"{loaded.device_name} in {loaded.dtype}{kept}{threads}"),
            ("load", seconds(loaded.load_s)),
            ("memory", f"{size(loaded.weight_bytes)} of weights{peak}"),
            ("ceilings", f"copies {size(roofs.copy)}/s, products {operations(roofs.flops)}"),
        ]
    )
    return "\n\n".join([facts, _speeds(edition), _latencies(edition), _rooflines(edition), *_left_out(edition)])


def _speeds(edition: Edition) -> str:
    heads = ("SPEED, tokens/s", "PREFILL", "DECODING", "OF ONE STREAM", "COMPUTED", "CACHED", "CAME")
    drafted = any(found.requests.draft_tokens for found in edition.found)
    rows: Rows = [(*heads, *(("BY DRAFTS",) if drafted else ()))]
    rows += [
        (
            str(found.scenario),
            with_spread(found.prefill_tokens_per_s),
            with_spread(found.decode_tokens_per_s),
            with_spread(found.requests.tokens_per_s),
            *_tokens(found.requests),
            *((_drafts(found.requests),) if drafted else ()),
        )
        for found in edition.found
    ]
    return table(rows)


def _tokens(requests: Summary) -> tuple[str, ...]:
    """Of prompt and answer of one stream, on average."""
    computed = requests.prompt_tokens - requests.cached_tokens
    sums = (computed, requests.cached_tokens, requests.output_tokens)
    return tuple(f"{of_all / requests.requests:g}" for of_all in sums)


def _drafts(requests: Summary) -> str:
    """How many of the tokens that came were drafts, and how many of the drafts those are."""
    accepted, drafted = requests.accepted_tokens, requests.draft_tokens
    share = f", {accepted / drafted:.0%} of drafts" if drafted else ""
    return f"{accepted / requests.requests:.3g}{share}"


def _latencies(edition: Edition) -> str:
    rows: Rows = [("LATENCY", "TTFT", "ITL p50", "p95", "p99", "TPOT", "E2E")]
    for found in edition.found:
        requests = found.requests
        gaps = requests.itl_s
        times = (requests.ttft_s.p50, gaps.p50, gaps.p95, gaps.p99, requests.tpot_s.p50, requests.e2e_s.p50)
        rows.append((str(found.scenario), *map(seconds, times)))
    return table(rows)


def _rooflines(edition: Edition) -> str:
    rows: Rows = [("ROOFLINE", "TOOK", "READING", "COMPUTING", "PRODUCTS", "REACHED", "OF ROOF", "BOUND BY")]
    for found in edition.found:
        rows.append(_roofline(f"{found.scenario} prefill", found.prefill, operations(found.prefill.flops_per_s)))
        if found.decode:
            rows.append(_roofline(f"{found.scenario} step", found.decode, f"{size(found.decode.bytes_per_s)}/s"))
    return table(rows)


def _roofline(name: str, roof: Roofline, reached: str) -> tuple[str, ...]:
    times = map(seconds, (roof.seconds, roof.reading_s, roof.computing_s, roof.products_s))
    return (name, *times, reached, f"{roof.of_roof:.0%}", roof.bound)


def _left_out(edition: Edition) -> list[str]:
    rows = [(f"not run: {scenario}", reason) for scenario, reason in edition.left_out]
    return [columns(rows)] if rows else []


def _compared(result: Result) -> str:
    a, b = (edition.loaded.name for edition in result.editions)
    rows = [(f"{one.scenario} {one.measure}", one.ratio.verdict(a, b)) for one in result.compared]
    return table([("COMPARED", f"{result.rounds} PAIRS OF ROUNDS"), *rows])
