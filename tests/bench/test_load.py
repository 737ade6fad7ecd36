from bench.cases import Serve
from bench.load import PROMPT, streams


def test_streams_arrive_one_after_another_with_prompts_of_their_own() -> None:
    load = list(streams(Serve(16, 9)))
    times = [stream.at for stream in load]
    assert times[0] == 0
    assert times == sorted(set(times))
    assert len({tuple(stream.token_ids) for stream in load}) == 16
    assert all((len(stream.token_ids), stream.n_tokens) == (PROMPT, 9) for stream in load)


def test_the_load_is_the_same_for_everybody() -> None:
    assert list(streams(Serve(5, 9))) == list(streams(Serve(5, 9)))
