from collections.abc import Mapping

import pytest

from bench.cases import CASES, ENGINES, Capture, Decode, EngineSpec, Serve, engine_of, matching
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
    cases = matching(CASES, [target.cases])
    assert cases
    for case in cases:
        taking_part = matching(ENGINES, case.engines)
        assert matching(taking_part, [engine_of(target.ours)])
        assert matching(taking_part, [engine_of(other) for other in target.others])


READ = EngineSpec("read", "float32")
SPECS = [
    EngineSpec("stepscope", "float32"),
    EngineSpec("stepscope", "int8"),
    EngineSpec("transformers", "float32", "static"),
    READ,
]


def test_page_shows_the_target_its_ratio_and_the_counts() -> None:
    result = rounds({OURS: 2.0, STATIC: 3.0, READ.name: 1.0})
    page = Page(SPECS, {"CPU": "a quick one"}, [result], next_ids={OURS: 7, STATIC: 7}).render()
    row = f"| decode-1x128 | {OURS} | {STATIC} | 1.50 (1.50 to 1.50) | 1.00 | 150% | 50% |"
    assert row in page
    assert "| decode-1x128 | 2000.0 (5/5) | 3000.0 (5/5) | 1000.0 (5/5) |" in page
    assert f"| {STATIC} | 7 |" in page
    assert "per second" not in page
    assert "| CPU | a quick one |" in page


def test_a_target_is_met_by_one_mode_in_all_rounds() -> None:
    kept = rounds(
        {OURS: 1.0, "stepscope-int8": 4.0, STATIC: 2.0},
        {OURS: 4.0, "stepscope-int8": 1.0, STATIC: 2.0},
        {OURS: 1.6, "stepscope-int8": 1.0, STATIC: 2.0},
    )
    kept.case = Decode(16, 128, 5)
    page = Page(SPECS, {}, [kept]).render()
    assert f"| decode-16x128 | stepscope-int8 | {STATIC} | 2.00 (0.50 to 2.00) | 1.30 |" in page


def test_a_target_without_a_goal_is_only_reported() -> None:
    specs = [EngineSpec("stepscope", "int8"), EngineSpec("ctranslate2", "int8")]
    page = Page(specs, {}, [rounds({"stepscope-int8": 2.0, INT8: 1.0})]).render()
    assert f"| decode-1x128 | stepscope-int8 | {INT8} | 0.50 (0.50 to 0.50) | none |  |" in page


def test_served_tokens_are_shown_per_second() -> None:
    specs = [EngineSpec("alone", "float32"), EngineSpec("http", "float32")]
    result = rounds({"alone-float32": 0.004, "http-float32": 0.005})
    result.case = Serve(16, 96)
    page = Page(specs, {}, [result]).render()
    assert "| serve-16 | 250 | 200 |" in page
    assert "| serve-16 | http-float32 | alone-float32 | 0.80 (0.80 to 0.80) | 0.90 | 89% |" in page
    assert "Milliseconds" not in page


def test_tables_of_others_are_shown_as_they_are() -> None:
    page = Page([], {}, tables={"Fork": [{"ours": OURS, "fork_us": 37.512}]}).render()
    assert "## Fork\n\n| ours | fork_us |\n| --- | --- |\n| stepscope-float32 | 37.51 |" in page


def test_what_looking_inside_costs_is_a_ratio_between_sides() -> None:
    bare, one = "alone-float32", "alone-float32+one"
    result = rounds({bare: 0.004, one: 0.005})
    result.case = Capture("capture", ("one",), 1, ())
    page = Page([EngineSpec("alone", "float32")], {}, [result]).render()
    assert f"| capture | {one} | {bare} | 0.80 (0.80 to 0.80) | 0.97 | 82% |" in page
    assert f"| capture | {bare} | 250 |\n| capture | {one} | 200 |" in page
    assert "Tokens or rebuilt rows" not in page
