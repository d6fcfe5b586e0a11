"""How an answer goes, told with each of its tokens: `timings` of llama.cpp's server (`timings_per_token`).

Beside that server's fields the last one has `queue_ms`, `ttft_ms`, `itl_p50_ms` and `itl_p99_ms`, as `metrics.py`
defines them. Knows nothing of HTTP.
"""

import math

from localllm.api.openai.responses import JsonObject
from localllm.metrics import Metrics
from localllm.request import GenerationEvent


class Timings:
    """Counts the tokens of one answer: `predicted_n` so far, `draft_n` of them guessed before, `draft_n_accepted`
    of these rightly."""

    def __init__(self) -> None:
        self.counts = {"predicted_n": 0, "draft_n": 0, "draft_n_accepted": 0}

    def fields_for(self, event: GenerationEvent) -> JsonObject:
        """What is known with this event; with the last, the measurements."""
        self.counts["predicted_n"] += len(event.token_ids)
        self.counts["draft_n"] += event.drafted
        self.counts["draft_n_accepted"] += event.accepted
        return {**self.counts, **(timing_fields(event.metrics) if event.metrics else {})}


def timing_fields(metrics: Metrics) -> JsonObject:
    """Milliseconds and tokens a second; null where nothing could be measured."""
    values = {
        "cache_n": metrics.cached_tokens,
        "prompt_n": metrics.prompt_tokens - metrics.cached_tokens,
        "prompt_ms": metrics.prefill_s * 1e3,
        "prompt_per_second": metrics.prefill_tokens_per_s,
        "predicted_ms": (metrics.e2e_s - metrics.ttft_s) * 1e3,
        "predicted_per_second": metrics.tokens_per_s,
        "queue_ms": metrics.queue_s * 1e3,
        "ttft_ms": metrics.ttft_s * 1e3,
        "itl_p50_ms": metrics.itl_percentile(50) * 1e3,
        "itl_p99_ms": metrics.itl_percentile(99) * 1e3,
    }
    return {name: None if math.isnan(value) else value for name, value in values.items()}
