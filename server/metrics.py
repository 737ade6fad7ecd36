"""Prometheus metrics under vLLM's names, `stepscope:` for `vllm:`. Own registry.

Counters are written on the model thread (`engine.protocol.Observer`) and the event loop; the
library locks. Gauges are read from the engine when they are asked for.
https://docs.vllm.ai/en/stable/usage/metrics
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.protocol import Finished
from engine.views import Stats

SUCCESSES = frozenset({"stop", "length", "done"})
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """Counts what the engine and the HTTP side tell; implements `Observer` and `HttpObserver`."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        """`stats` gives the engine's state now, or None while there is no engine."""
        self.registry = CollectorRegistry()
        self.registry.register(_Gauges(stats))
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens that clients gave")
        self._prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens that were found in the cache and not computed"
        )
        self._rebuilt_tokens = self._counter(
            "rebuilt_tokens", "Tokens stepped again, because their K/V had been given up"
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens that were sampled")
        self._success = self._counter(
            "request_success", "Requests that ended well", "finished_reason"
        )
        self._failure = self._counter("request_failure", "Requests that ended badly", "reason")
        self._queue = self._seconds("request_queue_time_seconds", "Wait before the first step")
        self._first = self._seconds("time_to_first_token_seconds", "Until the first step's end")
        self._whole = self._seconds("e2e_request_latency_seconds", "Of whole requests")
        self._per_token = self._seconds(
            "request_time_per_output_token_seconds", "Mean time between sampled tokens"
        )
        self._request_prompt = self._tokens("request_prompt_tokens", "Per request")
        self._request_generated = self._tokens("request_generation_tokens", "Per request")
        self._iteration_tokens = self._tokens("iteration_tokens_total", "Stepped per iteration")
        self._iteration_rows = self._tokens("iteration_rows", "Sessions stepped per iteration")
        self._iteration_seconds = self._seconds("iteration_seconds", "Of the model thread")
        self._http = self._counter("http_requests", "HTTP requests", "method", "route", "status")
        self._http_seconds = Histogram(
            "stepscope:http_request_duration_seconds",
            "HTTP requests, streams included",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )

    def iteration(self, *, n_rows: int, n_tokens: int, seconds: float) -> None:
        """See `engine.protocol.Observer`."""
        self._iteration_rows.observe(n_rows)
        self._iteration_tokens.observe(n_tokens)
        self._iteration_seconds.observe(seconds)

    def finished(self, request: Finished) -> None:
        """See `engine.protocol.Observer`."""
        ended_well = request.reason in SUCCESSES
        (self._success if ended_well else self._failure).labels(request.reason).inc()
        self._prompt_tokens.inc(request.n_prompt)
        self._prefix_hits.inc(request.n_cached)
        self._rebuilt_tokens.inc(request.n_rebuilt)
        self._generation_tokens.inc(request.n_generated)
        self._request_prompt.observe(request.n_prompt)
        self._request_generated.observe(request.n_generated)
        self._queue.observe(request.queue_seconds)
        self._whole.observe(request.seconds)
        if request.first_token_seconds is not None:
            self._first.observe(request.first_token_seconds)
            if request.n_generated > 1:
                between = request.seconds - request.first_token_seconds
                self._per_token.observe(between / (request.n_generated - 1))

    def http_request(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """See `server.middleware.HttpObserver`."""
        method = method if method in _METHODS else "other"
        self._http.labels(method, route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def exposition(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"stepscope:{name}", help_text, labels, registry=self.registry)

    def _seconds(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"stepscope:{name}", help_text, buckets=_SECONDS, registry=self.registry)

    def _tokens(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"stepscope:{name}", help_text, buckets=_TOKENS, registry=self.registry)


_METHODS = frozenset({"GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH"})


class _Gauges(Collector):
    """The engine's state at the moment of the scrape."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """One sample per gauge; none before the engine is there."""
        stats = self._stats()
        if stats is None:
            return
        kv = stats.kv
        yield _gauge("num_requests_running", "Requests in the batch", stats.running)
        yield _gauge("num_requests_waiting", "Requests that wait for room", stats.waiting)
        yield _gauge(
            "kv_cache_usage_perc", "Share of the K/V budget in use", kv.bytes_used / kv.bytes_total
        )
        yield _gauge("kv_cache_used_bytes", "K/V that sessions hold", kv.bytes_used)
        yield _gauge("kv_cache_shared_bytes", "Of it, held by several", kv.bytes_shared)
        yield _gauge("kv_cache_cached_bytes", "K/V kept for reuse only", kv.bytes_cached)
        yield _gauge("kv_cache_total_bytes", "K/V budget", kv.bytes_total)
        yield _gauge("sessions", "Sessions that live", stats.sessions)
        yield _evictions(stats)


def _evictions(stats: Stats) -> Metric:
    family = CounterMetricFamily(
        "stepscope:kv_evictions",
        "Sessions that gave their K/V up for room, or were preempted; cached pieces dropped",
        labels=("reason",),
    )
    for reason, count in stats.evictions.items():
        family.add_metric((reason,), count)
    return family


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"stepscope:{name}", help_text, value=value)
