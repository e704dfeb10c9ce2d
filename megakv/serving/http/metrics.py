"""Measurements of the server, for Prometheus and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megakv.serving.http.call import ServedModel
from megakv.serving.http.fields import KNOWN_HINT, UNKNOWN
from megakv.serving.stats import Document, ServingStats
from megakv.tracking.measurements import percentiles
from megakv.tracking.served import ServedCounts

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 400.0, 1000.0, 3600.0)
TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
TIERS = {
    "kv_tokens": "Tokens whose keys and values lie there",
    "kv_capacity": "Tokens for which there is room",
    "kv_bytes": "Bytes of keys and values, over all ranks",
}


class Metrics(Collector):
    """Measurements of one server, in a registry of its own: those of HTTP, and the loop's as they are when asked."""

    def __init__(self) -> None:
        self._stats: ServingStats | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._calls = Counter("megakv_http_requests", "HTTP requests", ["path", "status"], registry=self._registry)
        self._passed = Counter(
            "megakv_fields_passed_over",
            "Fields of requests that no endpoint knows and that change no answer",
            ["kind"],
            registry=self._registry,
        )
        for kind in (KNOWN_HINT, UNKNOWN):
            self._passed.labels(kind)
        self._ttft = Histogram(
            "megakv_time_to_first_token_seconds",
            "From a request to its answer's first token",
            buckets=SECONDS,
            registry=self._registry,
        )
        self._per_token = Histogram(
            "megakv_time_per_output_token_seconds",
            "Mean time from one token of an answer to the next",
            buckets=TOKEN_SECONDS,
            registry=self._registry,
        )

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        if (stats := self._stats) is None:
            return
        for each in fields(ServedCounts):
            family = GaugeMetricFamily if each.name.endswith("_max") else CounterMetricFamily
            yield family(f"megakv_{each.name}", each.metadata["meaning"], value=getattr(stats, each.name))
        for name in ("waiting", "running"):
            yield GaugeMetricFamily(f"megakv_requests_{name}", f"Requests that are {name}", value=getattr(stats, name))
        for name, meaning in TIERS.items():
            tiers = GaugeMetricFamily(f"megakv_{name}", meaning, labels=["tier"])
            for tier, value in getattr(stats, name).items():
                tiers.add_metric([tier], value)
            yield tiers
        memory = GaugeMetricFamily("megakv_memory_bytes", "Memory of a rank's device or process", labels=["rank"])
        for rank, value in enumerate(stats.memory_bytes):
            memory.add_metric([str(rank)], value)
        yield memory

    def count(self, path: str, status: int) -> None:
        """A request that was answered; paths are those of the endpoints, no stranger's."""
        self._calls.labels(path, str(status)).inc()

    def passed_over(self, numbers: Mapping[str, int]) -> None:
        """Fields of a body that were passed over, by why."""
        for kind, number in numbers.items():
            self._passed.labels(kind).inc(number)

    def timed(self, ttft_s: float, per_token_s: float | None) -> None:
        """An answer that has ended."""
        self._ttft.observe(ttft_s)
        if per_token_s is not None:
            self._per_token.observe(per_token_s)

    def text(self, stats: ServingStats) -> bytes:
        """All of it, as Prometheus reads it, with the loop's as they are now."""
        self._stats = stats
        return generate_latest(self._registry)


def status(stats: ServingStats, documents: Sequence[Document], served: ServedModel) -> dict[str, Any]:
    """A snapshot."""

    def beginning(document: Document) -> str:
        return served.tokenizer.decode(list(document.beginning), skip_special_tokens=True)

    values = asdict(stats)
    ttft, token = values.pop("ttft_s"), values.pop("token_s")
    return {
        "model": served.name,
        "context": served.context,
        **values,
        **_tails("ttft_s", ttft),
        **_tails("token_s", token),
        "documents": [{**asdict(each), "beginning": beginning(each)} for each in documents],
    }


def _tails(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {key.replace("/", "_"): value for key, value in percentiles(name, seconds).items()}
