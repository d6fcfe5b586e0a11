"""One answer for several replicas: metrics with a label `replica`, and the models of all of them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from localllm.metrics import Metrics
from localllm.server.prometheus import E2E_BUCKETS_S

SAMPLE = re.compile(rb"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")

JsonObject = dict[str, Any]


class FrontMetrics:
    """Metrics that a front counts itself; replicas count answers and tokens."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.retried = Counter(
            "localllm_front_retried",
            "Requests that were sent to another replica, as theirs had ended before it sent anything.",
            registry=self.registry,
        )
        self.lost = Counter(
            "localllm_front_lost", "Answers whose replica ended before they were complete.", registry=self.registry
        )
        self.requests = Histogram(
            "localllm_front_request_seconds",
            "HTTP request until the last byte of the response, at the front.",
            ("status",),
            buckets=E2E_BUCKETS_S,
            registry=self.registry,
        )

    def request_ended(self, method: str, route: str | None, status: int, seconds: float) -> None:
        self.requests.labels(status).observe(seconds)

    def answer_ended(
        self, model: str, reason: str, prompt_tokens: int, metrics: Metrics | None, output_tokens: int, key: str
    ) -> None:
        """Count nothing, as the replica does."""

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)


def merge_metrics(texts: Mapping[str, bytes]) -> bytes:
    """Metrics of all replicas in Prometheus' text format, each sample with the label `replica`, and each metric's
    samples together, as the format requires. texts: by number of the replica"""
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}  # comments and samples
    for number, text in texts.items():
        label = f'replica="{number}"'.encode()
        family: tuple[list[bytes], list[bytes]] = ([], [])
        for line in text.splitlines():
            if line.startswith(b"#"):
                name = line.split(b" ")[2]
                family = families.setdefault(name, ([], []))
                if line not in family[0]:
                    family[0].append(line)
            elif match := SAMPLE.fullmatch(line):
                labels = b",".join(filter(None, (label, match["labels"])))
                family[1].append(match["name"] + b"{" + labels + b"} " + match["value"])
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    return b"\n".join(lines) + b"\n" if lines else b""


def merge_state(path: str, answers: Sequence[tuple[str, JsonObject]]) -> JsonObject:
    """The answer of all replicas to `/localllm/ps`, `top`, `stop` or `/health`. answers: with the number of the
    replica, at least one"""
    objects = [answer for _, answer in answers]
    merged = dict(objects[0])
    if path == "/localllm/stop":
        return {"users": sum(each["users"] for each in objects)}
    merged["loading"] = [name for each in objects for name in each["loading"]]
    if path == "/health":
        models = list(dict.fromkeys(name for each in objects for name in each["models"]))
        return merged | {"models": models, "replicas": len(objects)}
    merged["models"] = [model | {"replica": number} for number, each in answers for model in each["models"]]
    if "events" in merged:
        merged["events"] = sorted((event for each in objects for event in each["events"]), key=event_time)
    if "free_bytes" in merged:  # of the machine with the least
        devices = {device for each in objects for device in each["free_bytes"]}
        merged["free_bytes"] = {
            device: min(each["free_bytes"][device] for each in objects if device in each["free_bytes"])
            for device in sorted(devices)
        }
    return merged


def event_time(event: JsonObject) -> float:
    return event["at"]
