import pytest

from bench.cases import CASES, ENGINES, Case, EngineSpec, engine_of, matching, side_of


def test_names_are_unique_and_all_batches_and_contexts_are_there() -> None:
    assert len({spec.name for spec in ENGINES}) == len(ENGINES)
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {f"decode-{b}x{c}" for b in (1, 4, 16, 64) for c in (128, 900)} <= set(names)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_pattern_of_a_case_names_an_engine(case: Case) -> None:
    assert all(matching(ENGINES, [pattern]) for pattern in case.engines)


def test_patterns_keep_the_order_of_what_they_name() -> None:
    names = [spec.name for spec in matching(ENGINES, ["read-*", "stepscope-float32"])]
    assert names == ["stepscope-float32", "read-float32", "read-bfloat16", "read-kv16-int8"]


def test_keys_and_values_are_in_bfloat16_where_the_mode_says_so() -> None:
    assert EngineSpec("stepscope", "int8").kv_dtype == "float32"
    assert EngineSpec("stepscope", "int8", "kv16").kv_dtype == "bfloat16"
    assert EngineSpec("stepscope", "bfloat16").kv_dtype == "bfloat16"


def test_a_side_tells_its_engine() -> None:
    assert side_of("http-float32", "") == "http-float32"
    assert side_of("http-float32", side_of("sse", "one")) == "http-float32+sse+one"
    assert engine_of("http-float32+sse+one") == engine_of("http-float32") == "http-float32"
