from collections.abc import Mapping

import pytest

from bench.cases import CASES, ENGINES, Decode, EngineSpec, Prefill, matching
from bench.driver import CaseResult
from bench.report import TARGETS, Page, Ratio, Target, fastest, ratio
from bench.samples import Sample

OURS, STATIC, INT8 = "stepscope-float32", "transformers-static-float32", "ctranslate2-int8"


def rounds(*seconds: Mapping[str, float]) -> CaseResult:
    """A result whose every sample is clean."""
    kept = [{name: [Sample(s, 0.0)] * 5 for name, s in one.items()} for one in seconds]
    return CaseResult(Decode(1, 128, 5), [*kept])


RESULT = rounds(
    {OURS: 2.0, STATIC: 3.0, INT8: 1.0},
    {OURS: 1.0, STATIC: 2.0, INT8: 4.0},
    {OURS: 4.0, STATIC: 5.0, INT8: 8.0},
)


def test_a_ratio_is_made_within_each_round() -> None:
    assert ratio(RESULT, OURS, [STATIC]) == Ratio(1.5, 1.25, 2.0)


def test_the_best_peer_is_found_in_each_round() -> None:
    assert ratio(RESULT, OURS, [STATIC, INT8]) == Ratio(1.25, 0.5, 2.0)
    assert fastest(RESULT, [STATIC, INT8]) == STATIC


def test_no_round_with_both_is_no_ratio() -> None:
    assert ratio(rounds({OURS: 1.0}, {STATIC: 1.0}), OURS, [STATIC]) is None


def test_an_engine_without_clean_steps_is_left_out_not_used_raw() -> None:
    dirty = CaseResult(Decode(1, 128, 5), [{OURS: [Sample(1, 0)] * 5, INT8: [Sample(1, 1)] * 5}])
    assert dirty.medians() == [{OURS: 1.0}]
    assert dirty.counts(INT8) == (0, 5)


@pytest.mark.parametrize("target", TARGETS)
def test_targets_name_cases_and_engines_that_exist(target: Target) -> None:
    assert any(case.name.startswith(target.cases) for case in CASES)
    assert target.ours in {spec.name for spec in ENGINES}
    assert any(target.accepts(spec) for spec in ENGINES)


def test_page_shows_the_target_its_ratio_and_the_counts() -> None:
    specs = [EngineSpec("stepscope", "float32"), EngineSpec("transformers", "float32", "static")]
    page = Page(specs, {"CPU": "a quick one"}, [RESULT], [], {OURS: 7, STATIC: 7}).render()
    row = "| decode-1x128 | stepscope-float32 | float32 | transformers-static-float32 "
    assert row + "| 1.50 (1.25 to 2.00) | 0.95 | 158% |" in page
    assert "| decode-1x128 | 2000.0 (15/15) | 3000.0 (15/15) |" in page
    assert "## Embedding step" not in page
    assert "| CPU | a quick one |" in page


def test_names_and_patterns() -> None:
    assert [case.name for case in CASES if isinstance(case, Prefill)] == [
        "prefill-128",
        "prefill-1023",
    ]
    assert len({spec.name for spec in ENGINES}) == len(ENGINES)
    assert [spec.name for spec in matching(ENGINES, ["read-*", OURS])] == [
        OURS,
        "read-float32",
        "read-bfloat16",
    ]
