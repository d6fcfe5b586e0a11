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
from localllm.server.lease import Loaded
from localllm.server.models import Models
from localllm.server.overview import free_memory
from localllm.server.recent import Recent

disable_created_metrics()  # a series of times beside each count, which nobody asked for
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds: of a token of a small model on a GPU up to an answer of ten minutes.
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
WAITS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
WHOLES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
OTHER = "other"  # the route of what is not served
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))

Number = tuple[str, str, float]  # name, help, value
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


class Sums:
    """One server's."""

    def __init__(self, models: Models):
        self.models = models
        self.recent = Recent()
        self.registry = CollectorRegistry()
        self.registry.register(self)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"localllm_{name}_seconds", text, labels, buckets=buckets, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"localllm_{name}", text, labels, registry=self.registry)

        self.ttft = histogram("time_to_first_token", "Arrival until the first token.", WAITS, "model")
        self.itl = histogram("inter_token_latency", "Gaps between tokens of an answer.", GAPS, "model")
        self.queue = histogram("queue", "Arrival until the first token is scheduled.", WAITS, "model")
        self.prefill = histogram("prefill", "First scheduling until the first token.", WAITS, "model")
        self.e2e = histogram("e2e", "Arrival until the last token.", WHOLES, "model")
        self.http = histogram(
            "http_request", "From the first byte to the last.", WHOLES, "method", "route", "status"
        )
        self.answers = counter("answers", "Answers that ended, by why.", "model", "finish_reason")
        self.prompt = counter("prompt_tokens", "Tokens of prompts.", "model")
        self.cached = counter("cached_tokens", "Of them, found in the cache.", "model")
        self.output = counter("output_tokens", "Tokens of answers.", "model")
        self.drafted = counter("draft_tokens", "Guesses that were verified.", "model")
        self.accepted = counter("accepted_tokens", "Of them, right.", "model")

    def ended(self, model: str, why: str, prompt: int, metrics: Metrics | None, tokens: int) -> None:
        """An answer of an account."""
        self.answers.labels(model, why).inc()
        self.prompt.labels(model).inc(prompt)
        if metrics is None:
            self.output.labels(model).inc(tokens)
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
        self.recent.ended(model, metrics)
        gaps = self.itl.labels(model)
        for gap in metrics.itl_s:
            gaps.observe(gap)

    def requested(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """An HTTP request, answered or left."""
        known = route is not None and method in METHODS
        self.http.labels(method if known else OTHER, route if known else OTHER, status).observe(seconds)

    def text(self) -> bytes:
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
        yield GaugeMetricFamily("localllm_models_loading", "Loads under way.", value=len(self.models.loads))
        yield from of_each(loaded, gauges_of, GaugeMetricFamily)
        yield from of_each(loaded, counters_of, CounterMetricFamily)
        free = GaugeMetricFamily("localllm_free_memory_bytes", "Free memory.", labels=["device"])
        for device, count in free_memory(loaded).items():
            free.add_metric([device], count)
        yield free

    def describe(self) -> Iterable[Metric]:
        """Asked when it is registered, before there is anything to tell."""
        return ()


def of_each(
    loaded: Iterable[Loaded], numbers: Callable[[Loaded], Iterator[Number]], kind: Family
) -> Iterator[Metric]:
    """A metric for every number, with a value for every model."""
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
    for one in loaded:
        for name, text, value in numbers(one):
            family = families.setdefault(name, kind(f"localllm_{name}", text, labels=["model"]))
            family.add_metric([one.llm.name], value)
    yield from families.values()


def gauges_of(one: Loaded) -> Iterator[Number]:
    stats = one.llm.stats()
    yield "running", "Answers that bring tokens.", stats.running
    yield "waiting", "Answers that wait for their first step.", stats.waiting
    yield "kv_blocks", "Blocks of the cache.", stats.blocks
    yield "kv_blocks_used", "Of them, in use by answers.", stats.used_blocks
    yield "kv_blocks_cached", "Of them, kept for prompts that begin alike.", stats.cached_blocks
    yield "weight_bytes", "Memory of the weights.", one.llm.weight_bytes
    yield "context_tokens", "Room for prompt and answer.", one.llm.context


def counters_of(one: Loaded) -> Iterator[Number]:
    """Since the model was loaded."""
    stats = one.llm.stats()
    yield "kv_blocks_evicted", "Blocks of the cache whose content gave way.", stats.evicted_blocks
    yield "preemptions", "Answers put back to make room.", stats.preemptions
