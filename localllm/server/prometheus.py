"""Metrics for Prometheus (`/metrics`).

Finished answers are counted here, so that counts outlive their model; current state is read from the engines on
each scrape. Labels are loaded models, API keys of the server, routes, methods and statuses, so clients cannot
create new ones. Times are
defined in `metrics.py`.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from localllm.errors import UsageError
from localllm.llm.llm import LLM
from localllm.metrics import Metrics, TierMove
from localllm.server.access import NO_KEY_LABEL
from localllm.server.lease import LoadedModel
from localllm.server.models import ModelPool
from localllm.server.native_api import free_memory
from localllm.server.request_stats import RecentLatencies

disable_created_metrics()  # no `_created` series beside each counter
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# From one token of a small model on a GPU to an answer of ten minutes.
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
E2E_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
OTHER_LABEL = "other"  # route of unknown paths
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

Sample = tuple[str, str, float]  # name, help, value
MetricFamily = type[GaugeMetricFamily] | type[CounterMetricFamily]


@dataclass(frozen=True)
class TokenPrice:
    """Prices of a million tokens."""

    prompt: float
    output: float
    cached: float  # prompt tokens that were found in the prefix cache

    @classmethod
    def parse(cls, text: str) -> "TokenPrice":
        """Parse `0.5,1.5` or `0.5,1.5,0.1`: prompt, answer and cached prompt tokens, by default as the first.

        Raises UsageError.
        """
        try:
            prices = [float(part) for part in text.split(",")]
        except ValueError:
            prices = []
        if len(prices) not in (2, 3) or not all(0 <= price < math.inf for price in prices):
            remedy = "give two or three prices of a million tokens, such as 0.5,1.5"
            raise UsageError(f"--token-price is {text!r}", remedy)
        return cls(prices[0], prices[1], prices[2] if len(prices) == 3 else prices[0])

    def cost(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        computed = self.prompt * (prompt_tokens - cached_tokens) + self.output * output_tokens
        return (computed + self.cached * cached_tokens) / 1e6


class ServerMetrics:
    """Counters and histograms of one server, and a collector for its current state."""

    def __init__(self, models: ModelPool, price: TokenPrice | None = None):
        self.models = models
        self.price = price
        self.recent_latencies = RecentLatencies()
        self.registry = CollectorRegistry()
        self.registry.register(self)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"localllm_{name}_seconds", text, labels, buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"localllm_{name}", text, labels, registry=self.registry)

        self.ttft = histogram("time_to_first_token", "Arrival until the first token.", TTFT_BUCKETS_S, "model")
        # Its own histogram, as `Histogram.observe` would take 2 us for every token.
        self.itl_counts: dict[str, list[int]] = {}  # by model, one for each bucket and one above
        self.itl_sums: dict[str, float] = {}
        self.queue = histogram("queue", "Arrival until the request is first scheduled.", TTFT_BUCKETS_S, "model")
        self.prefill = histogram("prefill", "First scheduling until the first token.", TTFT_BUCKETS_S, "model")
        self.e2e = histogram("e2e", "Arrival until the last token.", E2E_BUCKETS_S, "model")
        self.http = histogram(
            "http_request",
            "HTTP request until the last byte of the response.",
            E2E_BUCKETS_S,
            "method",
            "route",
            "status",
        )
        self.answers = counter("answers", "Finished answers.", "model", "finish_reason")
        self.prompt = counter("prompt_tokens", "Prompt tokens.", "model")
        self.cached = counter("cached_tokens", "Prompt tokens found in the prefix cache.", "model")
        self.output = counter("output_tokens", "Answer tokens.", "model")
        self.drafted = counter("draft_tokens", "Draft tokens that were verified.", "model")
        self.accepted = counter("accepted_tokens", "Draft tokens that were accepted.", "model")
        self.key_answers = counter("key_answers", "Finished answers by API key.", "key", "model")
        self.key_prompt = counter("key_prompt_tokens", "Prompt tokens by API key.", "key", "model")
        self.key_cached = counter("key_cached_tokens", "Cached prompt tokens by API key.", "key", "model")
        self.key_output = counter("key_output_tokens", "Answer tokens by API key.", "key", "model")
        self.key_cost = (
            counter("key_cost", "Cost of tokens by API key, at the server's prices.", "key", "model")
            if price
            else None
        )

    def count_key(self, key: str, model: str, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Count a finished answer for its API key."""
        self.key_answers.labels(key, model).inc()
        self.key_prompt.labels(key, model).inc(prompt_tokens)
        self.key_cached.labels(key, model).inc(cached_tokens)
        self.key_output.labels(key, model).inc(output_tokens)
        if self.key_cost and self.price:
            self.key_cost.labels(key, model).inc(self.price.cost(prompt_tokens, cached_tokens, output_tokens))

    def answer_ended(
        self,
        model: str,
        reason: str,
        prompt_tokens: int,
        metrics: Metrics | None,
        output_tokens: int,
        key: str = NO_KEY_LABEL,
    ) -> None:
        """Count a finished answer. output_tokens: used if there are no metrics, as the answer was cancelled."""
        cached = metrics.cached_tokens if metrics else 0
        self.count_key(key, model, prompt_tokens, cached, metrics.output_tokens if metrics else output_tokens)
        self.answers.labels(model, reason).inc()
        self.prompt.labels(model).inc(prompt_tokens)
        if metrics is None:
            self.output.labels(model).inc(output_tokens)
            return
        for counter, count in (
            (self.cached, metrics.cached_tokens),
            (self.output, metrics.output_tokens),
            (self.drafted, metrics.draft_tokens),
            (self.accepted, metrics.accepted_tokens),
        ):
            counter.labels(model).inc(count)
        for histogram, seconds in (
            (self.ttft, metrics.ttft_s),
            (self.queue, metrics.queue_s),
            (self.prefill, metrics.prefill_s),
            (self.e2e, metrics.e2e_s),
        ):
            if not math.isnan(seconds):
                histogram.labels(model).observe(seconds)
        self.recent_latencies.answer_ended(model, metrics)
        counts = self.itl_counts.setdefault(model, [0] * (len(ITL_BUCKETS_S) + 1))
        for gap in metrics.itl_s:
            counts[bisect_left(ITL_BUCKETS_S, gap)] += 1
        self.itl_sums[model] = self.itl_sums.get(model, 0.0) + sum(metrics.itl_s)

    def request_ended(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """Count an HTTP request. route: its path template; None for an unknown path."""
        known = route is not None and method in METHODS
        self.http.labels(method if known else OTHER_LABEL, route if known else OTHER_LABEL, status).observe(
            seconds
        )

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format. Blocks on the engines."""
        return generate_latest(self.registry)

    def inter_token_latencies(self) -> Metric:
        """Histogram of all gaps, by model."""
        text = "Time between consecutive tokens of an answer."
        family = HistogramMetricFamily("localllm_inter_token_latency_seconds", text, labels=["model"])
        bounds = [*map(floatToGoString, ITL_BUCKETS_S), "+Inf"]
        for model, counts in list(self.itl_counts.items()):
            buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
            family.add_metric([model], buckets, self.itl_sums[model])
        return family

    def collect(self) -> Iterator[Metric]:
        """Current state, and counters of pool and engines. Called by the registry on each scrape."""
        yield self.inter_token_latencies()
        loaded = list(self.models.loaded.values())
        events = CounterMetricFamily(
            "localllm_model_events", "Models loaded, unloaded, resized, failed to load.", labels=["event"]
        )
        for event_type, count in self.models.events.counts.items():
            events.add_metric([event_type], count)
        yield events
        yield GaugeMetricFamily("localllm_models_loaded", "Loaded models.", value=len(loaded))
        yield GaugeMetricFamily(
            "localllm_models_loading", "Model loads in progress.", value=len(self.models.pending_loads)
        )
        yield from model_metrics(loaded, gauge_samples, GaugeMetricFamily)
        yield from model_metrics(loaded, counter_samples, CounterMetricFamily)
        free = GaugeMetricFamily("localllm_free_memory_bytes", "Free memory.", labels=["device"])
        for device, count in free_memory(loaded).items():
            free.add_metric([device], count)
        yield free

    def describe(self) -> Iterable[Metric]:
        """Called at registration; the metrics are not known yet."""
        return ()


def model_metrics(
    models: Iterable[LoadedModel], samples: Callable[[LoadedModel], Iterator[Sample]], family_type: MetricFamily
) -> Iterator[Metric]:
    """One metric per sample name, with a value per model."""
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for loaded in models:
        for name, text, value in samples(loaded):
            family = families.setdefault(name, family_type(f"localllm_{name}", text, labels=["model"]))
            family.add_metric([loaded.llm.name], value)
    yield from families.values()


def gauge_samples(loaded: LoadedModel) -> Iterator[Sample]:
    stats = loaded.llm.stats()
    yield "running", "Running requests.", stats.running
    yield "waiting", "Queued requests.", stats.waiting
    yield "kv_blocks", "Blocks of the KV cache.", stats.blocks
    yield "kv_blocks_used", "Blocks in use by requests.", stats.used_blocks
    yield "kv_blocks_cached", "Unused blocks kept for prefix caching.", stats.cached_blocks
    yield "weight_bytes", "Memory of the weights.", loaded.llm.weight_bytes
    yield "context_tokens", "Maximum tokens of prompt and answer.", loaded.llm.context
    if isinstance(loaded.llm, LLM) and (tier := loaded.llm.parts.caches.prefill_tier):
        connected, processes = tier.process_counts
        yield "prefill_processes", "Processes that compute prompts, and run now.", connected
        yield "prefill_processes_wanted", "Processes that compute prompts, if none has ended.", processes


def counter_samples(loaded: LoadedModel) -> Iterator[Sample]:
    """Counts since the model was loaded."""
    stats = loaded.llm.stats()
    yield "kv_blocks_evicted", "Evicted KV cache blocks.", stats.evicted_blocks
    yield "preemptions", "Preempted requests.", stats.preemptions
    device_tokens = stats.cached_tokens - stats.host_tokens - stats.disk_tokens
    yield "prefix_lookup_tokens", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens
    yield "prefix_device_tokens", "Prompt tokens found on the device.", device_tokens
    yield "prefix_host_tokens", "Prompt tokens found in the host tier.", stats.host_tokens
    yield "prefix_disk_tokens", "Prompt tokens loaded from the disk tier.", stats.disk_tokens
    block_bytes = loaded.llm.memory.block_bytes if isinstance(loaded.llm, LLM) else 0
    yield "kv_offloaded_bytes", "Bytes moved to the host tier.", stats.offloaded_blocks * block_bytes
    yield "kv_restored_bytes", "Bytes copied back from the host tier.", stats.restored_blocks * block_bytes
    for name in ("device_to_host", "host_to_device"):
        move, words = stats.moves.get(name, TierMove()), name.replace("_", " ")
        yield f"kv_{name}_bytes", f"KV cache bytes copied from {words}, for the disk tier as well.", move.bytes
        yield f"kv_{name}_seconds", f"Time of copying from {words}.", move.seconds
    if move := stats.moves.get("prefill_to_decode"):
        yield "kv_prefill_to_decode_bytes", "KV cache bytes that prefill processes handed over.", move.bytes
        yield "kv_prefill_to_decode_seconds", "Time of copying them into the cache.", move.seconds
    if move := stats.moves.get("worker_to_host"):
        yield "kv_worker_to_host_bytes", "KV cache bytes that came from workers that compute prompts.", move.bytes
        yield "kv_worker_to_host_seconds", "Time from the first byte of each segment to the last.", move.seconds
    if disk := stats.disk:
        yield "kv_disk_written_bytes", "Bytes written to the disk tier.", disk.written_bytes
        yield "kv_disk_write_seconds", "Time of writing, in a thread.", disk.write_s
        yield "kv_disk_read_bytes", "Bytes read from the disk tier.", disk.read_bytes
        yield "kv_disk_read_seconds", "Time of reading, in a thread.", disk.read_s
        yield "kv_disk_skipped_segments", "Segments that a slow disk left unwritten.", disk.skipped_segments
        yield "kv_disk_slower_loads", "Stored prefixes that were faster to compute.", disk.slower_loads
