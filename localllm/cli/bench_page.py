"""What a person reads of a benchmark. No line over 100 characters unless a name is that long."""

from localllm.benchmark.report import with_spread
from localllm.benchmark.result import BenchmarkResult, ModelResult
from localllm.benchmark.roofline import Roofline
from localllm.benchmark.summary import RequestSummary
from localllm.formatting import (
    format_bytes,
    format_columns,
    format_count,
    format_flops,
    format_seconds,
    format_table,
)

Rows = list[tuple[str, ...]]


def format_benchmark(result: BenchmarkResult) -> str:
    """The whole page, without a line break at its end."""
    blocks = [_setup(result), *map(_format_edition, result.models)]
    if result.comparisons:
        blocks.append(_comparisons(result))
    if result.warnings:
        blocks.append("\n".join(f"warning: {warning}" for warning in result.warnings))
    return "\n\n".join(blocks)


def _setup(result: BenchmarkResult) -> str:
    machine, noise = result.machine, result.noise
    versions = "  ".join(f"{name} {version}" for name, version in machine.versions.items())
    load = "" if noise.load_average is None else f"load average {noise.load_average:.2f} before, "
    drafts = "with drafts" if result.drafts else "without drafts"
    rounds = "1 round" if result.rounds == 1 else f"{result.rounds} rounds"
    return format_columns(
        [
            ("date", result.date),
            ("processor", f"{machine.processor}, {machine.cores:g} cores, {machine.instructions}"),
            ("versions", versions + (f", commit {machine.commit}" if machine.commit else "")),
            ("measured", f"{rounds} after one to warm up, greedy, {drafts}, prompts of {result.prompts}"),
            ("noise", f"{load}others took {noise.others:.0%} of the processors, the host {noise.stolen:.0%}"),
        ]
    )


def _format_edition(edition: ModelResult) -> str:
    loaded, roofs = edition.loaded, edition.ceilings
    kept = f", keys and values in {loaded.kv_dtype}" if loaded.kv_dtype != loaded.dtype else ""
    threads = (
        "" if loaded.threads is None else f", {loaded.threads} threads" if loaded.threads > 1 else ", 1 thread"
    )
    forms = ", ".join(f"{name} {format_bytes(taken)}" for name, taken in loaded.formats.items())
    peak = "" if edition.peak_bytes is None else f", {format_bytes(edition.peak_bytes)} at most"
    facts = format_columns(
        [
            ("model", f"{loaded.name}, {format_count(loaded.parameters)} parameters"),
            ("stored as", forms),
            ("runs on", f"{loaded.device_name} in {loaded.dtype}{kept}{threads}"),
            ("load", format_seconds(loaded.load_s)),
            ("memory", f"{format_bytes(loaded.weight_bytes)} of weights{peak}"),
            ("ceilings", f"copies {format_bytes(roofs.copy)}/s, products {format_flops(roofs.flops)}"),
        ]
    )
    return "\n\n".join(
        [
            facts,
            _speeds(edition),
            _latencies(edition),
            _rooflines(edition),
            *_products(edition),
            *_not_run(edition),
        ]
    )


def _speeds(edition: ModelResult) -> str:
    heads = ("SPEED, tokens/s", "PREFILL", "DECODING", "OF ONE STREAM", "COMPUTED", "CACHED", "CAME")
    drafted = any(found.requests.draft_tokens for found in edition.scenarios)
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
        for found in edition.scenarios
    ]
    return format_table(rows)


def _tokens(requests: RequestSummary) -> tuple[str, ...]:
    """Of prompt and answer of one stream, on average."""
    computed = requests.prompt_tokens - requests.cached_tokens
    sums = (computed, requests.cached_tokens, requests.output_tokens)
    return tuple(f"{of_all / requests.requests:g}" for of_all in sums)


def _drafts(requests: RequestSummary) -> str:
    """How many of the tokens that came were drafts, and how many of the drafts those are."""
    accepted, drafted = requests.accepted_tokens, requests.draft_tokens
    share = f", {accepted / drafted:.0%} of drafts" if drafted else ""
    return f"{accepted / requests.requests:.3g}{share}"


def _latencies(edition: ModelResult) -> str:
    rows: Rows = [("LATENCY", "TTFT", "ITL p50", "p95", "p99", "TPOT", "E2E")]
    for found in edition.scenarios:
        requests = found.requests
        gaps = requests.itl_s
        times = (requests.ttft_s.p50, gaps.p50, gaps.p95, gaps.p99, requests.tpot_s.p50, requests.e2e_s.p50)
        rows.append((str(found.scenario), *map(format_seconds, times)))
    return format_table(rows)


def _rooflines(edition: ModelResult) -> str:
    rows: Rows = [("ROOFLINE", "TOOK", "READING", "COMPUTING", "PRODUCTS", "REACHED", "OF ROOF", "BOUND BY")]
    for found in edition.scenarios:
        rows.append(_roofline(f"{found.scenario} prefill", found.prefill, format_flops(found.prefill.flops_per_s)))
        if found.decode:
            rows.append(
                _roofline(f"{found.scenario} step", found.decode, f"{format_bytes(found.decode.bytes_per_s)}/s")
            )
    return format_table(rows)


def _roofline(name: str, roof: Roofline, reached: str) -> tuple[str, ...]:
    times = map(format_seconds, (roof.seconds, roof.reading_s, roof.computing_s, roof.products_s))
    return (name, *times, reached, f"{roof.of_roof:.0%}", roof.bound)


def _products(edition: ModelResult) -> list[str]:
    """Kernel, instructions and rate of each shape of matrix, with --explain."""
    if edition.products is None:
        return []
    rows: Rows = [("PRODUCTS", "MATRICES", "BYTES", "ONE ROW", "OF MEMORY", "KERNEL", "512 ROWS", "INSTRUCTIONS")]
    rows += [
        (
            f"{one.format} {one.rows} x {one.columns}",
            str(one.matrices),
            format_bytes(one.nbytes),
            f"{format_bytes(one.bytes_per_s)}/s",
            f"{one.of_memory:.0%}",
            one.decode_kernel,
            one.prefill_kernel,
            one.instructions or "-",
        )
        for one in edition.products
    ]
    return [format_table(rows)]


def _not_run(edition: ModelResult) -> list[str]:
    rows = [(f"not run: {scenario}", reason) for scenario, reason in edition.left_out]
    return [format_columns(rows)] if rows else []


def _comparisons(result: BenchmarkResult) -> str:
    a, b = (edition.loaded.name for edition in result.models)
    rows = [(f"{one.scenario} {one.measure}", one.ratio.verdict(a, b)) for one in result.comparisons]
    return format_table([("COMPARED", f"{result.rounds} PAIRS OF ROUNDS"), *rows])
