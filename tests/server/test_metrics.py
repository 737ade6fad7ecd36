import pytest
from prometheus_client.parser import text_string_to_metric_families

from cache.accounting import KVUsage
from engine.protocol import Finished
from engine.views import Stats
from server.metrics import Metrics

USAGE = KVUsage(bytes_total=100, bytes_used=25, bytes_shared=10, bytes_cached=40, bytes_per_token=1)
EVICTIONS = {"room": 1, "preempted": 2, "prefix": 3}
STATS = Stats(running=2, waiting=3, sessions=4, evictions=EVICTIONS, kv=USAGE)


def samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


def finished(reason: str, *, first_token_seconds: float | None = 0.2) -> Finished:
    return Finished(
        kind="generate",
        reason=reason,
        n_prompt=5,
        n_generated=11,
        n_cached=3,
        n_rebuilt=7,
        queue_seconds=0.1,
        first_token_seconds=first_token_seconds,
        seconds=1.2,
    )


def test_there_are_no_gauges_before_there_is_an_engine() -> None:
    told = samples(Metrics(lambda: None))
    assert "stepscope:num_requests_running" not in told
    assert told["stepscope:generation_tokens_total"] == 0


def test_gauges_show_the_engine_now() -> None:
    told = samples(Metrics(lambda: STATS))
    assert told["stepscope:num_requests_running"] == 2
    assert told["stepscope:num_requests_waiting"] == 3
    assert told["stepscope:kv_cache_usage_perc"] == 0.25
    assert told["stepscope:sessions"] == 4
    for kind, n_bytes in (("total", 100), ("used", 25), ("shared", 10), ("cached", 40)):
        assert told[f"stepscope:kv_cache_{kind}_bytes"] == n_bytes
    for reason, count in EVICTIONS.items():
        assert told[f"stepscope:kv_evictions_total {reason}"] == count


def test_a_request_that_ended_well() -> None:
    metrics = Metrics(lambda: STATS)
    metrics.finished(finished("length"))
    told = samples(metrics)
    assert told["stepscope:request_success_total length"] == 1
    assert told["stepscope:prompt_tokens_total"] == 5
    assert told["stepscope:generation_tokens_total"] == 11
    assert told["stepscope:prefix_cache_hits_total"] == 3
    assert told["stepscope:rebuilt_tokens_total"] == 7
    assert told["stepscope:time_to_first_token_seconds_sum"] == pytest.approx(0.2)
    assert told["stepscope:e2e_request_latency_seconds_sum"] == pytest.approx(1.2)
    assert told["stepscope:request_queue_time_seconds_count"] == 1
    assert told["stepscope:request_time_per_output_token_seconds_sum"] == pytest.approx(0.1)


def test_a_request_that_ended_badly() -> None:
    metrics = Metrics(lambda: STATS)
    metrics.finished(finished("StepFailed", first_token_seconds=None))
    told = samples(metrics)
    assert told["stepscope:request_failure_total StepFailed"] == 1
    assert told["stepscope:time_to_first_token_seconds_count"] == 0


def test_iterations() -> None:
    metrics = Metrics(lambda: STATS)
    metrics.iteration(n_rows=3, n_tokens=40, seconds=0.01)
    told = samples(metrics)
    assert told["stepscope:iteration_tokens_total_sum"] == 40
    assert told["stepscope:iteration_rows_sum"] == 3
    assert told["stepscope:iteration_seconds_count"] == 1


def test_http_requests_keep_the_number_of_labels_small() -> None:
    metrics = Metrics(lambda: STATS)
    metrics.http_request(method="GET", route="/health", status=200, seconds=0.1)
    metrics.http_request(method="BREW", route="unmatched", status=404, seconds=0.1)
    told = samples(metrics)
    assert told["stepscope:http_requests_total GET /health 200"] == 1
    assert told["stepscope:http_requests_total other unmatched 404"] == 1
