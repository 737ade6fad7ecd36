"""model.points: names, aliases, order and shapes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import SIZES, GPT2Config
from model.errors import UnknownPoint
from model.points import Point, all_points, parse_points

TINY = SIZES["tiny"]
GPT2 = SIZES["gpt2"]


def names(*specs: str, config: GPT2Config = TINY) -> list[str]:
    return [str(point) for point in parse_points(specs, config).points]


def test_all_points_in_forward_order() -> None:
    assert [str(point) for point in all_points(TINY)] == [
        "wte",
        "wpe",
        "embedding",
        "resid_pre.0",
        "resid_post.0",
        "resid_pre.1",
        "resid_post.1",
        "ln_f",
        "logits",
    ]


def test_a_selection_is_unique_and_in_forward_order() -> None:
    assert names("logits", "resid_post.1", "wte", "resid_post.0", "resid_post.*", "wte") == [
        "wte",
        "resid_post.0",
        "resid_post.1",
        "logits",
    ]


def test_no_specs_select_nothing() -> None:
    assert parse_points([], TINY).points == ()


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        ("resid_pre.*", range(12)),
        ("resid_pre.3:5", [3, 4]),
        ("resid_pre.0:12", range(12)),
        ("resid_pre.11:12", [11]),
        ("resid_pre.11", [11]),
    ],
)
def test_the_layer_place(spec: str, layers: range | list[int]) -> None:
    assert names(spec, config=GPT2) == [f"resid_pre.{layer}" for layer in layers]


@pytest.mark.parametrize(
    ("alias", "canonical"),
    [
        # TransformerLens
        ("hook_embed", "wte"),
        ("hook_pos_embed", "wpe"),
        ("blocks.0.hook_resid_pre", "resid_pre.0"),
        ("blocks.7.hook_in", "resid_pre.7"),
        ("blocks.7.hook_resid_post", "resid_post.7"),
        ("blocks.7.hook_out", "resid_post.7"),
        ("ln_final.hook_out", "ln_f"),
        ("unembed.hook_out", "logits"),
        # Hugging Face
        ("transformer.wte", "wte"),
        ("transformer.wpe", "wpe"),
        ("hidden_states[0]", "resid_pre.0"),
        ("hidden_states[11]", "resid_pre.11"),
        ("hidden_states[12]", "ln_f"),
        ("transformer.h.11", "resid_post.11"),
        ("transformer.ln_f", "ln_f"),
        ("lm_head", "logits"),
        # nnsight
        ("transformer.wte.output", "wte"),
        ("transformer.wpe.output", "wpe"),
        ("transformer.h[0].input", "resid_pre.0"),
        ("transformer.h[11].output", "resid_post.11"),
        ("transformer.ln_f.output", "ln_f"),
        ("lm_head.output", "logits"),
    ],
)
def test_other_systems_names_are_answered_under_ours(alias: str, canonical: str) -> None:
    selection = parse_points([alias], GPT2)

    assert [str(point) for point in selection.points] == [canonical]
    assert selection.aliases == {alias: canonical}


def test_a_pattern_of_aliases_is_listed_name_by_name() -> None:
    assert parse_points(["hidden_states[*]"], TINY).aliases == {
        "hidden_states[0]": "resid_pre.0",
        "hidden_states[1]": "resid_pre.1",
        "hidden_states[2]": "ln_f",
    }


def test_a_canonical_name_is_no_alias() -> None:
    assert parse_points(["embedding", "resid_post.*"], TINY).aliases == {}


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "resid_post",
        "resid_post.",
        "resid_post.2",
        "resid_post.-1",
        "resid_post.1:1",
        "resid_post.1:0",
        "resid_post.0:3",
        "resid_post.:1",
        "resid_post.1:",
        "resid_post.**",
        "resid_post.٣",
        "resid_post.1 ",
        "wte.0",
        "hidden_states[3]",
        "Embedding",
        "blocks.*",
        "z.1",
        "*",
        "resid_post." + "9" * 5000,
    ],
)
def test_an_unknown_name_is_refused(spec: str) -> None:
    with pytest.raises(UnknownPoint) as caught:
        parse_points(["wte", spec], TINY)

    assert caught.value.name == spec
    assert len(str(caught.value)) < 300


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(UnknownPoint, match=r"did you mean resid_post\.1") as caught:
        parse_points(["resid_pst.1"], TINY)

    assert caught.value.nearest[0] == "resid_post.1"


def test_shapes_axes_and_bytes() -> None:
    residual, logits = Point("resid_post", 3), Point("logits")

    assert (residual.shape(GPT2), residual.axes, residual.n_bytes(GPT2)) == (
        (768,),
        ("n_embd",),
        3072,
    )
    assert (logits.shape(GPT2), logits.axes, logits.n_bytes(GPT2)) == (
        (50257,),
        ("n_vocab",),
        201028,
    )


def test_points_are_values() -> None:
    assert Point("resid_pre", 1) == Point("resid_pre", 1)
    assert len({Point("wte"), Point("wte"), Point("resid_pre", 0)}) == 2
    assert Point("resid_post", 0) < Point("resid_pre", 1) < Point("ln_f")


@given(st.sets(st.sampled_from(all_points(GPT2))))
@settings(deadline=None, max_examples=50)
def test_names_of_points_select_those_points(points: set[Point]) -> None:
    assert parse_points([str(point) for point in points], GPT2).points == tuple(sorted(points))


@given(st.text(alphabet="resid_pot.hn[]*:0129 blckw", max_size=24))
@settings(deadline=None, max_examples=200)
def test_any_text_selects_known_points_or_is_refused(spec: str) -> None:
    try:
        points = parse_points([spec], TINY).points
    except UnknownPoint:
        return
    assert points
    assert set(points) <= set(all_points(TINY))
