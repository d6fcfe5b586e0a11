"""What a server has done so far and does now, as Prometheus reads it (`/metrics`).

What ends is added up here, so that it outlives the model it was asked of; what is now is asked of the engines when
somebody reads. Labels are names of models that were loaded, routes, methods and statuses: strangers make no new
ones. The definitions of the times are those of `metrics.py`.
"""

import math
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from localllm.metrics import Metrics
from localllm.server.lease import LoadedModel
from localllm.server.models import ModelPool
from localllm.server.native_api import free_memory
from localllm.server.request_stats import RecentLatencies

disable_created_metrics()  # a series of times beside each count, which nobody asked for
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds: of a token of a small model on a GPU up to an answer of ten minutes.
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
E2E_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
OTHER_LABEL = "other"  # the route of what is not served
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

Sample = tuple[str, str, float]  # name, help, value
MetricFamily = type[GaugeMetricFamily] | type[CounterMetricFamily]


class ServerMetrics:
    """One server's."""

    def __init__(self, models: ModelPool):
        self.models = models
        self.recent_latencies = RecentLatencies()
        self.registry = CollectorRegistry()
        self.registry.register(self)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"localllm_{name}_seconds", text, labels, buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"localllm_{name}", text, labels, registry=self.registry)

        self.ttft = histogram("time_to_first_token", "Arrival until the first token.", TTFT_BUCKETS_S, "model")
        self.itl = histogram("inter_token_latency", "Gaps between tokens of an answer.", ITL_BUCKETS_S, "model")
        self.queue = histogram("queue", "Arrival until the first token is scheduled.", TTFT_BUCKETS_S, "model")
        self.prefill = histogram("prefill", "First scheduling until the first token.", TTFT_BUCKETS_S, "model")
        self.e2e = histogram("e2e", "Arrival until the last token.", E2E_BUCKETS_S, "model")
        self.http = histogram(
            "http_request", "From the first byte to the last.", E2E_BUCKETS_S, "method", "route", "status"
        )
        self.answers = counter("answers", "Answers that ended, by why.", "model", "finish_reason")
        self.prompt = counter("prompt_tokens", "Tokens of prompts.", "model")
        self.cached = counter("cached_tokens", "Of them, found in the cache.", "model")
        self.output = counter("output_tokens", "Tokens of answers.", "model")
        self.drafted = counter("draft_tokens", "Guesses that were verified.", "model")
        self.accepted = counter("accepted_tokens", "Of them, right.", "model")

    def answer_ended(
        self, model: str, why: str, prompt_tokens: int, metrics: Metrics | None, output_tokens: int
    ) -> None:
        """An answer of an account."""
        self.answers.labels(model, why).inc()
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
        gaps = self.itl.labels(model)
        for gap in metrics.itl_s:
            gaps.observe(gap)

    def request_ended(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """An HTTP request, answered or left."""
        known = route is not None and method in METHODS
        self.http.labels(method if known else OTHER_LABEL, route if known else OTHER_LABEL, status).observe(
            seconds
        )

    def exposition(self) -> bytes:
        """The exposition. Asks engines what they do, so not for the event loop."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What is now, and what engines and models count themselves."""
        loaded = list(self.models.loaded.values())
        events = CounterMetricFamily(
            "localllm_model_events", "What became of models: loaded, unloaded, resized, failed.", labels=["event"]
        )
        for what, count in self.models.events.counts.items():
            events.add_metric([what], count)
        yield events
        yield GaugeMetricFamily("localllm_models_loaded", "Models in memory.", value=len(loaded))
        yield GaugeMetricFamily(
            "localllm_models_loading", "Loads under way.", value=len(self.models.pending_loads)
        )
        yield from model_metrics(loaded, gauge_samples, GaugeMetricFamily)
        yield from model_metrics(loaded, counter_samples, CounterMetricFamily)
        free = GaugeMetricFamily("localllm_free_memory_bytes", "Free memory.", labels=["device"])
        for device, count in free_memory(loaded).items():
            free.add_metric([device], count)
        yield free

    def describe(self) -> Iterable[Metric]:
        """Asked when it is registered, before there is anything to tell."""
        return ()


def model_metrics(
    loaded: Iterable[LoadedModel], numbers: Callable[[LoadedModel], Iterator[Sample]], family_type: MetricFamily
) -> Iterator[Metric]:
    """A metric for every number, with a value for every model."""
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for one in loaded:
        for name, text, value in numbers(one):
            family = families.setdefault(name, family_type(f"localllm_{name}", text, labels=["model"]))
            family.add_metric([one.llm.name], value)
    yield from families.values()


def gauge_samples(one: LoadedModel) -> Iterator[Sample]:
    stats = one.llm.stats()
    yield "running", "Answers that bring tokens.", stats.running
    yield "waiting", "Answers that wait for their first step.", stats.waiting
    yield "kv_blocks", "Blocks of the cache.", stats.blocks
    yield "kv_blocks_used", "Of them, in use by answers.", stats.used_blocks
    yield "kv_blocks_cached", "Of them, kept for prompts that begin alike.", stats.cached_blocks
    yield "weight_bytes", "Memory of the weights.", one.llm.weight_bytes
    yield "context_tokens", "Room for prompt and answer.", one.llm.context


def counter_samples(one: LoadedModel) -> Iterator[Sample]:
    """Since the model was loaded."""
    stats = one.llm.stats()
    yield "kv_blocks_evicted", "Blocks of the cache whose content gave way.", stats.evicted_blocks
    yield "preemptions", "Answers put back to make room.", stats.preemptions
