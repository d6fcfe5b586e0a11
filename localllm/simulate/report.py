"""A simulation as text and as JSON."""

import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from localllm.formatting import format_bytes, format_columns, format_seconds, format_table, three_digits
from localllm.hardware.prices import RentalPrice
from localllm.simulate.capacity import Capacity, Objective, Requirement, Sensitivity
from localllm.simulate.cost import Cost
from localllm.simulate.fleet import FleetSetup
from localllm.simulate.load import LoadPlan
from localllm.simulate.simulation import MEASURES, PERCENTILES, EngineSetup, Simulated
from localllm.simulate.target import Target
from localllm.simulate.tiers import TierSetup

LABELS = {"queue": "queue", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
HOUR_S = 3600
VALUE_WIDTH = 66  # columns of values beside the longest label, so that lines have at most 80
Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Report:
    """What a simulation was asked, and what it found."""

    target: Target
    load: LoadPlan
    trace_format: str | None
    cost: Cost
    simulated: Simulated
    objective: Objective | None = None
    capacity: Capacity | None = None
    requirement: Requirement | None = None  # of the load, if it is more than the capacity
    sensitivities: list[Sensitivity] = field(default_factory=list)
    price: RentalPrice | None = None  # of the device

    def per_s(self, count: float) -> float:
        return count / self.simulated.duration_s if self.simulated.duration_s > 0 else math.nan

    @property
    def goodput(self) -> float | None:
        """Requests per second that met every objective."""
        return self.per_s(self.simulated.met(self.objective.limits)) if self.objective else None

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Of output, in the price's currency."""
        if self.price is None:
            return None
        device_s = self.simulated.device_s * self.target.devices
        return self.price.per_hour / HOUR_S * device_s / self.simulated.output_tokens * 1e6

    @property
    def joules_per_token(self) -> float | None:
        """Of output, at the most that the device draws, while steps run."""
        watts = self.target.watts
        if watts is None:
            return None
        return watts * self.target.devices * self.simulated.busy_s / self.simulated.output_tokens

    @property
    def busy(self) -> float:
        """The share of the time of all replicas in which steps ran."""
        return min(1.0, self.simulated.busy_s / self.simulated.device_s) if self.simulated.device_s else 0.0

    @property
    def bandwidth_share(self) -> float | None:
        return self.share(self.simulated.bytes_read, self.target.rates and self.target.rates.bandwidth)

    @property
    def flops_share(self) -> float | None:
        return self.share(self.simulated.operations, self.target.rates and self.target.rates.flops)

    def share(self, amount: float | None, rate: float | None) -> float | None:
        if amount is None or rate is None or not self.simulated.device_s:
            return None
        return amount / rate / self.simulated.device_s


def describe_load(load: LoadPlan, trace_format: str | None) -> str:
    if load.trace:
        speed = "" if load.speed == 1 else f", {load.speed:g} times as fast"
        return f"{min(load.requests, len(load.trace))} requests of a trace ({trace_format}){speed}"
    system = f"a system prompt of {load.system} tokens, " if load.system else ""
    turns = f"conversations of {load.turns} turns, " if load.turns > 1 else ""
    lengths = f"{turns}{system}prompts of {load.prompt} tokens, answers of {load.output}"
    if load.users is not None:
        return f"{load.users} users who think for {load.think_s:g} s (mean, exponential), {lengths}"
    bursts = "Poisson" if load.burstiness == 1 else f"gamma with burstiness {load.burstiness:g}"
    what = "conversations" if load.turns > 1 else "requests"
    return f"{load.rate:g} {what}/s ({bursts}), {lengths}"


def describe_engine(setup: EngineSetup) -> str:
    batching = setup.batching
    if batching != "continuous":
        batching += f" batching of {setup.batch_size}"
        batching += f", after at most {setup.max_wait_s:g} s" if setup.batching == "dynamic" else ""
    else:
        batching += " batching"
    parts = [
        f"{batching}, up to {setup.max_running} running",
        f"steps of {setup.token_budget} tokens",
        f"a cache of {setup.blocks * setup.block_size} tokens, contexts of {setup.context}",
        *describe_tiers(setup.tiers),
        *(["shortest prompt first"] if setup.order == "shortest" else []),
        *([] if setup.admission else ["no reservation for answers"]),
        *([] if setup.prefix_caching else ["no prefix caching"]),
        *([f"{setup.drafts} draft tokens, accepted with {setup.acceptance:.0%}"] if setup.drafts else []),
    ]
    return "; ".join(parts)


def describe_fleet(fleet: FleetSetup, duration_s: float) -> str:
    """Return the replicas in words; empty for a single one. duration_s: of the run, before or after a failure"""
    if fleet.is_single:
        return ""
    if fleet.prefill:
        assert fleet.link
        parts = [
            f"{fleet.prefill} for prompts and {fleet.replicas - fleet.prefill} for answers; "
            f"{three_digits(fleet.token_bytes / 1e3)} kB per token over {fleet.link.bandwidth / 1e9:g} GB/s"
        ]
    elif fleet.scales:
        parts = [f"{fleet.replicas} to {fleet.most_replicas}, for {fleet.scale_target:g} requests each"]
    else:
        parts = [str(fleet.replicas)]
    parts.append(f"routed by {fleet.route}")
    if fleet.start_s:
        parts.append(f"started within {fleet.start_s:g} s")
    parts += [
        f"replica {number} fails after {at:g} s" + ("" if at <= duration_s else ", when the run has ended")
        for number, at in fleet.kills
    ]
    return "; ".join(parts)


def format_report(report: Report) -> str:
    """Return the report as text, without a final line break."""
    simulated, fit = report.simulated, report.target.fit
    fleet = describe_fleet(report.target.setup.fleet, simulated.duration_s)
    facts: Rows = [
        ("model", f"{report.target.model}, {fit.quant or fit.dtype}, keys and values in {fit.kv_dtype}"),
        ("device", report.target.device),
        ("step times", report.cost.source),
        ("engine", describe_engine(report.target.setup)),
        *([("replicas", fleet)] if fleet else []),
        ("load", describe_load(report.load, report.trace_format)),
        (
            "simulated",
            f"{simulated.requests} requests in {format_seconds(simulated.duration_s)}, {simulated.steps} steps"
            + (f"; {simulated.refused} refused as too long" if simulated.refused else ""),
        ),
    ]
    rows = [("", *(f"p{percent}" for percent in PERCENTILES))]
    for name in MEASURES:
        rows.append((LABELS[name], *(format_time(value) for value in simulated.percentiles(name))))
    blocks = [
        columns(facts),
        format_table(rows),
        columns(totals(report)),
    ]
    if answers := answer_lines(report):
        blocks.append("\n".join(answers))
    return "\n\n".join(blocks)


def columns(rows: Rows) -> str:
    return format_columns([row for name, text in rows for row in wrapped(name, text)])


def wrapped(name: str, text: str) -> Rows:
    lines = textwrap.wrap(text, VALUE_WIDTH, break_long_words=False, break_on_hyphens=False)
    return [(name if i == 0 else "", line) for i, line in enumerate(lines)]


def format_time(value: float) -> str:
    return "-" if math.isnan(value) else "0 s" if value == 0 else format_seconds(value)


def totals(report: Report) -> Rows:
    simulated = report.simulated
    rate = f"{three_digits(report.per_s(simulated.requests))} requests/s"
    rows: Rows = [
        ("throughput", f"{rate}, {three_digits(report.per_s(simulated.output_tokens))} output tokens/s"),
    ]
    if report.objective and report.goodput is not None:
        share = report.objective.attained(simulated)
        rows.append(("goodput", f"{three_digits(report.goodput)} requests/s; {share:.1%} meet the objectives"))
    busy = f"steps ran {report.busy:.0%} of the time"
    if report.bandwidth_share is not None and report.flops_share is not None:
        busy += f"; {report.bandwidth_share:.0%} of the bandwidth, {report.flops_share:.0%} of the arithmetic"
    rows.append(("utilisation", busy))
    hits = simulated.cached_tokens / simulated.prompt_tokens if simulated.prompt_tokens else 0.0
    rows += [
        ("cache hits", f"{hits:.1%} of the prompt tokens{describe_hits(report)}"),
        *tier_rows(report),
        ("preemptions", str(simulated.preemptions)),
        ("requests", f"at most {simulated.most_running} at once, {simulated.most_waiting} waiting"),
    ]
    if len(simulated.replicas) > 1:
        shares = ", ".join(str(replica.requests) for replica in simulated.replicas)
        mean = simulated.device_s / simulated.duration_s
        rows.append(("replicas", f"{three_digits(mean)} up on average; requests of each: {shares}"))
    if simulated.failed or simulated.retried:
        rows.append(
            ("failures", f"{simulated.failed} answers broke off, {simulated.retried} requests were sent again")
        )
    if simulated.transfers:
        size = format_bytes(round(simulated.transferred_bytes / simulated.transfers))
        seconds = format_seconds(simulated.transfer_s / simulated.transfers)
        rows.append(("transfers", f"{simulated.transfers} of {size} on average, each within {seconds}"))
    if simulated.draft_tokens:
        accepted = simulated.accepted_tokens / simulated.draft_tokens
        rows.append(("draft tokens", f"{simulated.draft_tokens}, {accepted:.0%} accepted"))
    several = report.target.devices * report.target.setup.fleet.most_replicas > 1
    per_gpu = "a GPU's " if several else ""
    if report.price and report.cost_per_million_tokens is not None:
        amount = f"{three_digits(report.cost_per_million_tokens)} {report.price.currency}".strip()
        rows.append(("cost", f"{amount} per million output tokens, at {per_gpu}{report.price.describe()}"))
    if report.joules_per_token is not None:
        joules = three_digits(report.joules_per_token)
        rows.append(("energy", f"at most {joules} J per output token, at {per_gpu}{report.target.watts:g} W"))
    return rows


def describe_hits(report: Report) -> str:
    """Return the shares of the tiers below the device; empty without any."""
    simulated, tiers = report.simulated, report.target.setup.tiers
    parts = [
        f"{tokens / max(1, simulated.prompt_tokens):.1%} from {name}"
        for name, tokens, blocks in (
            ("main memory", simulated.host_tokens, tiers.host_blocks),
            ("the disk", simulated.disk_tokens, tiers.disk_blocks),
        )
        if blocks
    ]
    return f", {' and '.join(parts)}" if parts else ""


def tier_rows(report: Report) -> Rows:
    """Return what moved between tiers."""
    simulated, tiers = report.simulated, report.target.setup.tiers
    rows: Rows = []
    if tiers.host_bandwidth:
        moved, seconds = simulated.moved_blocks * tiers.block_bytes, simulated.moved_blocks * tiers.move_s
        text = f"{format_bytes(round(moved))} between device and main memory, for which steps took "
        rows.append(("moves", f"{text}{format_time(seconds)} in all"))
    if tiers.disk_blocks:
        written, read = format_bytes(simulated.disk_written_bytes), format_bytes(simulated.disk_read_bytes)
        text = f"{written} written, {read} read"
        if simulated.unwritten_blocks:
            left_out = format_bytes(round(simulated.unwritten_blocks * tiers.block_bytes))
            text += f"; {left_out} left out, for which it was too slow"
        if simulated.slower_loads:
            prefixes = f"{simulated.slower_loads} prefix" + ("es" if simulated.slower_loads != 1 else "")
            text += f"; {prefixes} computed instead, which was faster"
        rows.append(("disk", text))
    return rows


def describe_tiers(tiers: TierSetup) -> list[str]:
    parts: list[str] = []
    if tiers.host_blocks:
        size = format_bytes(round(tiers.host_blocks * tiers.block_bytes))
        parts.append(f"{size} of main memory over {tiers.host_bandwidth / 1e9:g} GB/s")
    if tiers.disk_blocks:
        size = format_bytes(round(tiers.disk_blocks * tiers.block_bytes))
        parts.append(f"{size} of disk at {tiers.disk_bandwidth / 1e9:g} GB/s")
    return parts


def answer_lines(report: Report) -> list[str]:
    """Return sentences on the highest load within the objectives."""
    if report.capacity is None or report.objective is None:
        return []
    limits = ", ".join(f"{LABELS[name]} <= {limit * 1e3:g} ms" for name, limit in report.objective.limits.items())
    promise = f"{limits} for {report.objective.attainment:.0%} of the requests"
    fleet = report.target.setup.fleet
    serves = f"{report.target.device} serves"
    if fleet.most_replicas > 1:
        limit = "up to " if fleet.scales else ""
        serves = f"{limit}{fleet.most_replicas} replicas on {report.target.device} serve"
    if report.capacity.simulated is None:
        text = f"{serves} no such load within {promise}"
    else:
        text = f"{serves} {describe_capacity(report.load, report.capacity)} within {promise}"
    if report.capacity.at_least:
        text += f"; {report.load.requests} requests are too few to find more: give more --requests"
    lines = textwrap.wrap(text + describe_requirement(report), 80, break_on_hyphens=False)
    for alternative in report.requirement.alternatives if report.requirement else ():
        share = alternative.attainment
        result = "does not fit" if share is None else f"{share:.1%} of the requests are within them"
        lines.append(f"  {alternative.flags}: {result}")
    for change in report.sensitivities:
        lines.append(f"  {change.assumption}: {describe_capacity(report.load, change)}")
    return lines


def describe_capacity(load: LoadPlan, capacity: Capacity | Sensitivity) -> str:
    return ("at least " if capacity.at_least else "") + load.describe(capacity.amount)


def describe_requirement(report: Report) -> str:
    """Return what a load above the capacity takes, as the end of a sentence; empty if it is served."""
    needs, fleet = report.requirement, report.target.setup.fleet
    if needs is None:
        return ""
    wanted = report.load.describe()
    verb = "needs" if report.load.users == 1 else "need"
    settings = [alternative.flags for alternative in needs.alternatives if alternative.serves]
    as_many = "one" if fleet.most_replicas == 1 else "as many"
    choices = " or ".join(filter(None, (", ".join(settings[:-1]), *settings[-1:])))
    other = f"{as_many} with {choices}" if settings else ""
    if needs.fleet is None:
        return f"; {wanted} {verb} {other}" if other else f"; no setting that was tried serves {wanted}"
    count = needs.fleet.most_replicas
    replicas = f"{count} replicas"
    if needs.fleet.prefill:
        replicas += f", {needs.fleet.prefill} of them for prompts"
    return f"; {wanted} {verb} {replicas}" + (f", or {other}" if other else "")


def as_dict(report: Report) -> dict[str, Any]:
    """Return the object that `--json` prints; docs/simulate.md describes its fields."""
    simulated, target, load = report.simulated, report.target, report.load
    capacity = report.capacity
    return {
        "model": target.model,
        "device": target.device,
        "quant": target.fit.quant,
        "dtype": target.fit.dtype,
        "kv_dtype": target.fit.kv_dtype,
        "step_times": report.cost.source,
        "engine": asdict(target.setup),
        "load": {
            "rate": load.rate,
            "burstiness": load.burstiness,
            "users": load.users,
            "think_s": load.think_s,
            "turns": load.turns,
            "system": load.system,
            "prompt": str(load.prompt),
            "output": str(load.output),
            "trace": report.trace_format,
            "speed": load.speed,
            "seed": load.seed,
        },
        "requests": simulated.requests,
        "refused": simulated.refused,
        "duration_s": simulated.duration_s,
        "steps": simulated.steps,
        **{
            f"{name}_s": {
                f"p{percent}": none_if_nan(value)
                for percent, value in zip(PERCENTILES, simulated.percentiles(name), strict=True)
            }
            for name in MEASURES
        },
        "requests_per_s": none_if_nan(report.per_s(simulated.requests)),
        "output_tokens_per_s": none_if_nan(report.per_s(simulated.output_tokens)),
        "prompt_tokens": simulated.prompt_tokens,
        "cached_tokens": simulated.cached_tokens,
        "host_tokens": simulated.host_tokens,
        "disk_tokens": simulated.disk_tokens,
        "moved_bytes": simulated.moved_blocks * target.setup.tiers.block_bytes,
        "disk_written_bytes": simulated.disk_written_bytes,
        "disk_read_bytes": simulated.disk_read_bytes,
        "disk_unwritten_bytes": simulated.unwritten_blocks * target.setup.tiers.block_bytes,
        "slower_loads": simulated.slower_loads,
        "output_tokens": simulated.output_tokens,
        "draft_tokens": simulated.draft_tokens,
        "accepted_tokens": simulated.accepted_tokens,
        "preemptions": simulated.preemptions,
        "most_running": simulated.most_running,
        "most_waiting": simulated.most_waiting,
        "busy": report.busy,
        "bandwidth_share": report.bandwidth_share,
        "flops_share": report.flops_share,
        "objectives_s": report.objective and report.objective.limits,
        "attainment": report.objective and report.objective.attainment,
        "met": report.objective and simulated.met(report.objective.limits),
        "goodput_requests_per_s": none_if_nan(report.goodput),
        "price_per_hour": report.price and report.price.per_hour,
        "price_source": report.price and report.price.describe(),
        "cost_per_million_tokens": none_if_nan(report.cost_per_million_tokens),
        "watts": target.watts,
        "joules_per_token": none_if_nan(report.joules_per_token),
        "capacity": capacity
        and {
            "amount": capacity.amount,
            "at_least": capacity.at_least,
            "unit": "users" if load.users is not None else "speed" if load.trace else "requests/s",
            "runs": capacity.runs,
        },
        "requirement": report.requirement
        and {
            "replicas": report.requirement.fleet and report.requirement.fleet.most_replicas,
            "alternatives": [asdict(alternative) for alternative in report.requirement.alternatives],
        },
        "replicas": [asdict(replica) for replica in simulated.replicas],
        "failed": simulated.failed,
        "retried": simulated.retried,
        "transfers": simulated.transfers,
        "transferred_bytes": simulated.transferred_bytes,
        "transfer_s": simulated.transfer_s,
        "sensitivity": [asdict(change) for change in report.sensitivities],
        "wall_s": simulated.wall_s,
    }


def none_if_nan(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value
