import pytest

from bench.cases import CASES, Capture, Serve
from bench.load import PROMPT, points_of, prompts, streams
from model.config import GPT2Config

GPT2 = GPT2Config(n_ctx=1024, n_embd=768, n_layer=12, n_head=12)


def test_streams_arrive_one_after_another_with_prompts_of_their_own() -> None:
    load = list(streams(Serve(16, 9)))
    times = [stream.at for stream in load]
    assert times[0] == 0
    assert times == sorted(set(times))
    assert len({tuple(stream.token_ids) for stream in load}) == 16
    assert all((len(stream.token_ids), stream.n_tokens) == (PROMPT, 9) for stream in load)


def test_the_load_is_the_same_for_everybody() -> None:
    assert list(streams(Serve(5, 9))) == list(streams(Serve(5, 9)))


def test_sessions_of_a_capture_share_no_prompt() -> None:
    asked = prompts(Capture("capture", (), 1, (), n_sessions=16, context=7))
    assert len({tuple(token_ids) for token_ids in asked}) == 16
    assert all(len(token_ids) == 7 for token_ids in asked)


def test_what_is_captured_is_what_the_cases_promise() -> None:
    asked = {one for case in CASES if isinstance(case, Capture) for one in case.asked}
    points = {one: points_of(one, GPT2) for one in asked}
    assert set(points) == {"one", "residuals", "cheap", "all"}
    assert [*map(str, points["one"])] == ["resid_post.6"]
    assert len(points["residuals"]) == 13
    extra = {point.name for point in set(points["all"]) - set(points["cheap"])}
    assert extra == {"scores", "pattern", "head_out", "lens"}


def test_a_side_that_is_not_known_is_no_side_without_internals() -> None:
    assert points_of("", GPT2) == ()
    with pytest.raises(ValueError, match="everything"):
        points_of("everything", GPT2)
