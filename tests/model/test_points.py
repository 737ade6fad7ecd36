"""model.points: names, aliases, order and shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import SIZES, GPT2Config
from model.errors import TooManyPoints, UnknownPoint
from model.points import (
    MAX_NAMES,
    MAX_UNITS,
    Point,
    all_points,
    parse_point,
    parse_points,
)

TINY = SIZES["tiny"]
GPT2 = SIZES["gpt2"]


def names(*specs: str, config: GPT2Config = TINY) -> list[str]:
    return [str(point) for point in parse_points(specs, config).points]


BLOCK = (
    *("resid_pre", "ln_1_scale", "ln_1_normalized", "ln_1", "q", "k", "v", "scores", "pattern"),
    *("z", "head_out", "attn_out", "resid_mid", "ln_2_scale", "ln_2_normalized", "ln_2"),
    *("mlp_pre", "mlp_post", "mlp_out", "resid_post"),
)


def test_all_points_in_forward_order() -> None:
    assert [str(point) for point in all_points(TINY)] == [
        *("wte", "wpe", "embedding"),
        *(f"{name}.0" for name in BLOCK),
        *(f"{name}.1" for name in BLOCK),
        *("ln_f_scale", "ln_f_normalized", "ln_f", "lens.0", "lens.1", "logits"),
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
        "z.2",
        "*",
        "resid_post.01",
        "resid_post.1\n",
        "resid_post.1[]",
        "resid_post.1[ 0]",
        "resid_post.1[0,]",
        "resid_post.1[00]",
        "resid_post.1[-1]",
        "resid_post.1[0:2]",
        "resid_post.1[0][1]",
        "resid_post[0].1",
        "resid_post.{l}",
        "resid_post.1[" + "0," * 5000 + "0]",
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


@pytest.mark.parametrize(
    ("spec", "shape", "axes"),
    [
        ("wte", (768,), ("n_embd",)),
        ("ln_1_scale.3", (1,), ("one",)),
        ("ln_2_normalized.3", (768,), ("n_embd",)),
        ("k.3", (12, 64), ("n_head", "d_head")),
        ("k.3[11]", (1, 64), ("n_head", "d_head")),
        ("scores.3", (12, 8), ("n_head", "key")),
        ("pattern.3[2,0]", (2, 8), ("n_head", "key")),
        ("head_out.3", (12, 768), ("n_head", "n_embd")),
        ("head_out.3[6]", (1, 768), ("n_head", "n_embd")),
        ("mlp_post.3", (3072,), ("n_inner",)),
        ("mlp_post.3[1007]", (1,), ("n_inner",)),
        ("ln_f_scale", (1,), ("one",)),
        ("lens.11", (2, 10), ("id_logit", "top")),
        ("lens.11[0]", (2, 1), ("id_logit", "top")),
        ("logits", (50257,), ("n_vocab",)),
        ("logits[318,262]", (2,), ("n_vocab",)),
    ],
)
def test_shapes_and_axes(spec: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    point = parse_point(spec, GPT2)

    assert (point.shape(GPT2, position=7), point.axes) == (shape, axes)
    assert str(point) == spec


def test_bytes_are_those_at_the_last_position() -> None:
    assert Point("resid_post", 3).n_bytes(GPT2) == 768 * 4
    assert Point("scores", 3).n_bytes(GPT2) == 12 * 1024 * 4
    assert Point("scores", 3, (5,)).n_bytes(GPT2) == 1024 * 4
    assert Point("logits").n_bytes(GPT2) == 50257 * 4


def test_units_are_rows_of_heads_or_the_last_axis() -> None:
    heads, neurons = np.arange(24, dtype=np.float32).reshape(2, 12), np.arange(5, dtype=np.float32)

    assert Point("z", 0, (1,)).select(heads).tolist() == [heads[1].tolist()]
    assert Point("lens", 0, (3, 1)).select(heads).tolist() == [[3, 1], [15, 13]]
    assert Point("mlp_post", 0, (4, 0)).select(neurons).tolist() == [4, 0]
    assert Point("z", 0).select(heads) is heads


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("z.*[1]", ["z.0[1]", "z.1[1]"]),
        ("resid_post.0:2[31,0]", ["resid_post.0[31,0]", "resid_post.1[31,0]"]),
        ("blocks.1.attn.hook_z[0]", ["z.1[0]"]),
        ("blocks.*.mlp.hook_post[127]", ["mlp_post.0[127]", "mlp_post.1[127]"]),
        ("attentions[1][0]", ["pattern.1[0]"]),
        ("hidden_states[*][5]", ["resid_pre.0[5]", "resid_pre.1[5]", "ln_f[5]"]),
        ("transformer.h[1].attn.output[1][0]", ["pattern.1[0]"]),
        ("lm_head.output[50256]", ["logits[50256]"]),
        ("ln_f_scale[0]", ["ln_f_scale[0]"]),
    ],
)
def test_units_on_any_name(spec: str, canonical: list[str]) -> None:
    assert names(spec) == canonical


def test_the_whole_and_its_units_are_points_of_their_own() -> None:
    asked = ("z.1[1]", "z.0[1,0]", "z.0", "z.0[0]", "z.0[1]")
    assert names(*asked) == ["z.0", "z.0[0]", "z.0[1]", "z.0[1,0]", "z.1[1]"]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("z.0[2]", r"units of z\.0 are 0 to 1$"),
        ("z.*[0,2]", r"units of z\.0 are 0 to 1$"),
        ("blocks.1.attn.hook_k[99999]", r"'blocks\.1\.attn\.hook_k\[99999\]': units of k\.1 are"),
        ("mlp_pre.0[128]", "0 to 127$"),
        ("logits[50257]", "0 to 50256$"),
        ("lens.0[10]", "0 to 9$"),
        ("ln_1_scale.0[1]", "0 to 0$"),
        ("z.0[1,1]", "distinct"),
        ("resid_post.2", "layers are 0 to 1$"),
        ("resid_post.1:1", "layers are 0 to 1$"),
        ("hidden_states[3]", "layers are 0 to 2$"),
    ],
)
def test_out_of_range_is_refused_with_the_range(spec: str, reason: str) -> None:
    with pytest.raises(UnknownPoint, match=reason) as caught:
        parse_points([spec], TINY)

    assert caught.value.name == spec


def test_units_of_one_name_are_bounded() -> None:
    most = ",".join(map(str, range(MAX_UNITS)))

    assert len(parse_point(f"logits[{most}]", TINY).units or ()) == MAX_UNITS
    with pytest.raises(UnknownPoint, match="at most 1024"):
        parse_points([f"logits[{most},1024]"], TINY)


def test_names_of_one_request_are_bounded_after_patterns_are_widened() -> None:
    xl = SIZES["gpt2-xl"]
    specs = [f"mlp_post.*[{unit}]" for unit in range(1024)]
    n_most = MAX_NAMES // xl.n_layer

    assert len(parse_points(specs[:n_most], xl).points) == n_most * xl.n_layer
    with pytest.raises(TooManyPoints, match="more than 8192"):
        parse_points(specs, xl)
    assert len(all_points(xl)) < MAX_NAMES


def test_an_edit_needs_one_point() -> None:
    assert str(parse_point("blocks.1.attn.hook_z[1]", TINY)) == "z.1[1]"
    with pytest.raises(UnknownPoint, match="stands for 2 points"):
        parse_point("z.*", TINY)
    with pytest.raises(UnknownPoint, match="stands for 3 points"):
        parse_point("transformer.h.1.attn.c_attn", TINY)


@pytest.mark.parametrize(
    "spec",
    [
        "blocks.1.ln1.hook_in",
        "blocks.1.ln2.hook_in[3]",
        "blocks.1.attn.q.hook_in",
        "transformer.h[1].ln_2.input",
        "h.1.ln_1.input",
    ],
)
def test_an_input_that_others_read_too_can_be_read_but_not_edited(spec: str) -> None:
    assert len(names(spec)) == 1
    with pytest.raises(UnknownPoint, match="pass by other readers"):
        parse_point(spec, TINY)


def test_what_a_point_is_good_for() -> None:
    everything = all_points(TINY)

    def those(kind: str) -> set[str]:
        return {str(point) for point in everything if getattr(point, kind)}

    assert those("is_looked_up") == {"wte", "wpe", "embedding", "resid_pre.0"}
    assert those("is_head_product") == {"lens.0", "lens.1", "logits"}
    assert those("is_editable") == {str(p) for p in everything} - those("is_head_product")
    assert {point.name for point in everything if point.is_ragged} == {"scores", "pattern"}
    assert {point.name for point in everything if point.costs_extra} == {
        *("scores", "pattern", "head_out", "lens")
    }


def test_units_do_not_change_what_a_point_is() -> None:
    point = Point("resid_pre", 0, (3,))

    assert point.is_looked_up
    assert point.whole == Point("resid_pre", 0)
    assert Point("pattern", 0, (1,)).is_ragged


def test_points_are_values() -> None:
    assert Point("resid_pre", 1) == Point("resid_pre", 1)
    assert len({Point("wte"), Point("wte"), Point("resid_pre", 0)}) == 2
    assert Point("resid_post", 0) < Point("resid_pre", 1) < Point("ln_f") < Point("lens", 0)
    assert Point("z", 0) != Point("z", 0, (0,))


@given(st.sets(st.sampled_from(all_points(GPT2))))
@settings(deadline=None, max_examples=50)
def test_names_of_points_select_those_points(points: set[Point]) -> None:
    assert parse_points([str(point) for point in points], GPT2).points == tuple(sorted(points))


@given(st.text(alphabet="resid_pot.hn[]*:,0129 blckw", max_size=24))
@settings(deadline=None, max_examples=200)
def test_any_text_selects_known_points_or_is_refused(spec: str) -> None:
    try:
        points = parse_points([spec], TINY).points
    except UnknownPoint:
        return
    assert points
    assert {point.whole for point in points} <= set(all_points(TINY))
