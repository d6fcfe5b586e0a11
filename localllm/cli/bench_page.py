"""Report of `localllm bench` as text, of at most 100 columns unless a name is longer."""

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
    """The report without a final line break."""
    blocks = [_setup(result), *map(_format_model, result.models)]
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
            ("measured", f"{rounds} after a warm-up round, greedy, {drafts}, prompts of {result.prompts}"),
            ("noise", f"{load}other processes used {noise.others:.0%} of the CPUs, the host {noise.stolen:.0%}"),
        ]
    )


def _format_model(model: ModelResult) -> str:
    loaded, roofs = model.loaded, model.ceilings
    kv_dtype = f", KV cache in {loaded.kv_dtype}" if loaded.kv_dtype != loaded.dtype else ""
    threads = (
        "" if loaded.threads is None else f", {loaded.threads} threads" if loaded.threads > 1 else ", 1 thread"
    )
    formats = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in loaded.formats.items())
    peak = "" if model.peak_bytes is None else f", {format_bytes(model.peak_bytes)} peak"
    facts = format_columns(
        [
            ("model", f"{loaded.name}, {format_count(loaded.parameters)} parameters"),
            ("stored as", formats),
            ("runs on", f"{loaded.device_name} in {loaded.dtype}{kv_dtype}{threads}"),
            ("load", format_seconds(loaded.load_s)),
            ("memory", f"{format_bytes(loaded.weight_bytes)} of weights{peak}"),
            ("ceilings", f"copies {format_bytes(roofs.copy)}/s, matmul {format_flops(roofs.flops)}"),
        ]
    )
    return "\n\n".join(
        [facts, _speeds(model), _latencies(model), _rooflines(model), *_products(model), *_not_run(model)]
    )


def _speeds(model: ModelResult) -> str:
    heads = ("SPEED, tokens/s", "PREFILL", "DECODE", "PER STREAM", "COMPUTED", "CACHED", "OUTPUT")
    has_drafts = any(result.requests.draft_tokens for result in model.scenarios)
    rows: Rows = [(*heads, *(("ACCEPTED DRAFTS",) if has_drafts else ()))]
    rows += [
        (
            str(result.scenario),
            with_spread(result.prefill_tokens_per_s),
            with_spread(result.decode_tokens_per_s),
            with_spread(result.requests.tokens_per_s),
            *_tokens(result.requests),
            *((_drafts(result.requests),) if has_drafts else ()),
        )
        for result in model.scenarios
    ]
    return format_table(rows)


def _tokens(requests: RequestSummary) -> tuple[str, ...]:
    """Computed and cached prompt tokens and output tokens, per stream on average."""
    computed = requests.prompt_tokens - requests.cached_tokens
    totals = (computed, requests.cached_tokens, requests.output_tokens)
    return tuple(f"{total / requests.requests:g}" for total in totals)


def _drafts(requests: RequestSummary) -> str:
    """Accepted draft tokens per stream on average, and the acceptance rate."""
    accepted, drafted = requests.accepted_tokens, requests.draft_tokens
    rate = f", {accepted / drafted:.0%} of drafts" if drafted else ""
    return f"{accepted / requests.requests:.3g}{rate}"


def _latencies(model: ModelResult) -> str:
    rows: Rows = [("LATENCY", "TTFT", "ITL p50", "p95", "p99", "TPOT", "E2E")]
    for result in model.scenarios:
        requests = result.requests
        itl = requests.itl_s
        times = (requests.ttft_s.p50, itl.p50, itl.p95, itl.p99, requests.tpot_s.p50, requests.e2e_s.p50)
        rows.append((str(result.scenario), *map(format_seconds, times)))
    return format_table(rows)


def _rooflines(model: ModelResult) -> str:
    rows: Rows = [("ROOFLINE", "TIME", "READ", "COMPUTE", "MATMUL", "REACHED", "OF ROOF", "BOUND BY")]
    for result in model.scenarios:
        rows.append(
            _roofline(f"{result.scenario} prefill", result.prefill, format_flops(result.prefill.flops_per_s))
        )
        if result.decode:
            rows.append(
                _roofline(f"{result.scenario} step", result.decode, f"{format_bytes(result.decode.bytes_per_s)}/s")
            )
    return format_table(rows)


def _roofline(name: str, roof: Roofline, reached: str) -> tuple[str, ...]:
    times = map(format_seconds, (roof.seconds, roof.reading_s, roof.computing_s, roof.products_s))
    return (name, *times, reached, f"{roof.of_roof:.0%}", roof.bound)


def _products(model: ModelResult) -> list[str]:
    """Kernel, instructions and rate of each shape of matrix, with --explain."""
    if model.products is None:
        return []
    rows: Rows = [("PRODUCTS", "MATRICES", "BYTES", "ONE ROW", "OF MEMORY", "KERNEL", "512 ROWS", "INSTRUCTIONS")]
    rows += [
        (
            f"{product.format} {product.rows} x {product.columns}",
            str(product.matrices),
            format_bytes(product.nbytes),
            f"{format_bytes(product.bytes_per_s)}/s",
            f"{product.of_memory:.0%}",
            product.decode_kernel,
            product.prefill_kernel,
            product.instructions or "-",
        )
        for product in model.products
    ]
    return [format_table(rows)]


def _not_run(model: ModelResult) -> list[str]:
    rows = [(f"not run: {scenario}", reason) for scenario, reason in model.left_out]
    return [format_columns(rows)] if rows else []


def _comparisons(result: BenchmarkResult) -> str:
    a, b = (model.loaded.name for model in result.models)
    rows = [
        (f"{comparison.scenario} {comparison.measure}", comparison.ratio.verdict(a, b))
        for comparison in result.comparisons
    ]
    return format_table([("COMPARED", f"{result.rounds} PAIRS OF ROUNDS"), *rows])
