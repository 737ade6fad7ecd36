"""model.names: what other systems call the points, and which of their names are none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import SIZES
from model.errors import UnknownPoint
from model.names import ALIASES
from model.points import Point, parse_points

TINY = SIZES["tiny"]
GPT2 = SIZES["gpt2"]

# Every hook name of a TransformerBridge of a GPT-2 (TransformerLens 4.3.0), with and without
# compatibility mode, and the point whose value it has there; "" where there is none.
BRIDGE = {
    "embed.hook_in": "",
    "embed.hook_out": "wte",
    "hook_embed": "wte",
    "pos_embed.hook_in": "",
    "pos_embed.hook_out": "wpe",
    "hook_pos_embed": "wpe",
    "blocks.3.hook_in": "resid_pre.3",
    "blocks.3.hook_resid_pre": "resid_pre.3",
    "blocks.3.ln1.hook_in": "resid_pre.3",
    "blocks.3.ln1.hook_scale": "ln_1_scale.3",
    "blocks.3.ln1.hook_normalized": "ln_1_normalized.3",
    "blocks.3.ln1.hook_out": "ln_1.3",
    "blocks.3.hook_attn_in": "",
    "blocks.3.hook_q_input": "",
    "blocks.3.hook_k_input": "",
    "blocks.3.hook_v_input": "",
    "blocks.3.attn.hook_attn_in": "",
    "blocks.3.attn.hook_q_input": "",
    "blocks.3.attn.hook_k_input": "",
    "blocks.3.attn.hook_v_input": "",
    "blocks.3.attn.hook_in": "ln_1.3",
    "blocks.3.attn.qkv.hook_in": "ln_1.3",
    "blocks.3.attn.qkv.hook_out": "q.3,k.3,v.3",
    "blocks.3.attn.q.hook_in": "ln_1.3",
    "blocks.3.attn.q.hook_out": "q.3",
    "blocks.3.attn.hook_q": "q.3",
    "blocks.3.attn.k.hook_in": "ln_1.3",
    "blocks.3.attn.k.hook_out": "k.3",
    "blocks.3.attn.hook_k": "k.3",
    "blocks.3.attn.v.hook_in": "ln_1.3",
    "blocks.3.attn.v.hook_out": "v.3",
    "blocks.3.attn.hook_v": "v.3",
    "blocks.3.attn.hook_attn_scores": "scores.3",
    "blocks.3.attn.hook_pattern": "pattern.3",
    "blocks.3.attn.o.hook_in": "z.3",
    "blocks.3.attn.hook_z": "z.3",
    "blocks.3.attn.hook_result": "head_out.3",
    "blocks.3.attn.o.hook_out": "attn_out.3",
    "blocks.3.attn.hook_hidden_states": "attn_out.3",
    "blocks.3.attn.hook_out": "attn_out.3",
    "blocks.3.hook_attn_out": "attn_out.3",
    "blocks.3.hook_resid_mid": "resid_mid.3",
    "blocks.3.hook_mlp_in": "",
    "blocks.3.ln2.hook_in": "resid_mid.3",
    "blocks.3.ln2.hook_scale": "ln_2_scale.3",
    "blocks.3.ln2.hook_normalized": "ln_2_normalized.3",
    "blocks.3.ln2.hook_out": "ln_2.3",
    "blocks.3.mlp.hook_in": "ln_2.3",
    "blocks.3.mlp.in.hook_in": "ln_2.3",
    "blocks.3.mlp.in.hook_out": "mlp_pre.3",
    "blocks.3.mlp.hook_pre": "mlp_pre.3",
    "blocks.3.mlp.out.hook_in": "mlp_post.3",
    "blocks.3.mlp.hook_post": "mlp_post.3",
    "blocks.3.mlp.out.hook_out": "mlp_out.3",
    "blocks.3.mlp.hook_out": "mlp_out.3",
    "blocks.3.hook_mlp_out": "mlp_out.3",
    "blocks.3.hook_out": "resid_post.3",
    "blocks.3.hook_resid_post": "resid_post.3",
    "ln_final.hook_in": "resid_post.11",
    "ln_final.hook_scale": "ln_f_scale",
    "ln_final.hook_normalized": "ln_f_normalized",
    "ln_final.hook_out": "ln_f",
    "unembed.hook_in": "ln_f",
    "unembed.hook_out": "logits",
    "hook_unembed": "logits",
}

MODULES = {
    "transformer.wte": "wte",
    "transformer.wpe.output": "wpe",
    "transformer.drop": "embedding",
    "hidden_states[0]": "resid_pre.0",
    "hidden_states[11]": "resid_pre.11",
    "hidden_states[12]": "ln_f",
    "attentions[11]": "pattern.11",
    "transformer.h.11": "resid_post.11",
    "transformer.h[0].input": "resid_pre.0",
    "transformer.h[11].output": "resid_post.11",
    "transformer.h[11].output[0]": "resid_post.11",
    "h.11.attn": "attn_out.11",
    "h[11].attn.output[0]": "attn_out.11",
    "transformer.h[11].attn.output[1]": "pattern.11",
    "transformer.h[11].attn.c_attn.output": "q.11,k.11,v.11",
    "transformer.h.11.attn.c_proj.input": "z.11",
    "transformer.h[11].ln_2.input": "resid_mid.11",
    "transformer.h.11.ln_1": "ln_1.11",
    "transformer.h.11.mlp.c_fc": "mlp_pre.11",
    "transformer.h.11.mlp.act": "mlp_post.11",
    "transformer.h.11.mlp": "mlp_out.11",
    "transformer.ln_f.input": "resid_post.11",
    "transformer.ln_f": "ln_f",
    "lm_head": "logits",
    "lm_head.output": "logits",
}

SHORT = {"attn.2": "pattern.2", "attn_probs.2": "pattern.2", "attn_scores.2": "scores.2"}


def named(spec: str) -> str:
    return ",".join(map(str, parse_points([spec], GPT2).points))


@pytest.mark.parametrize(
    ("alias", "canonical"),
    [(a, c) for a, c in {**BRIDGE, **MODULES, **SHORT}.items() if c],
)
def test_other_systems_names_are_answered_under_ours(alias: str, canonical: str) -> None:
    assert named(alias) == canonical
    assert parse_points([alias], GPT2).aliases == {alias: canonical}


ELSEWHERE = """
    blocks.3.attn.hook_rot_k blocks.3.mlp.hook_pre_linear blocks.3.mlp.hook_mid
    blocks.3.mlp.hook_gate blocks.3.mlp.gate.hook_out blocks.3.mlp.ln.hook_scale
    blocks.3.attn.q_norm.hook_out blocks.3.ln1_post.hook_out blocks.3.cross_attn.hook_z
    blocks.3.hook_cross_attn_out blocks.3.hook_resid_mid2 blocks.3.hook_normalized_resid_post
    hook_full_embed hook_token_type_embed token_type_embed.hook_out hook_tokens
    W_E b_U blocks.3.attn.W_Q blocks.*.mlp.b_in blocks.3.ln1.w ln_final.b embed.W_E pos_embed.W_pos
    unembed.b_U transformer.wte.weight h[3].ln_1.bias blocks.3.attn.OV
    wpe.input h.3.attn.output h[3].attn.output[2] past_key_values[3][0] past_key_values
"""


@pytest.mark.parametrize(
    "name", [*(name for name, canonical in BRIDGE.items() if not canonical), *ELSEWHERE.split()]
)
def test_a_hook_without_a_point_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UnknownPoint) as caught:
        parse_points([name], GPT2)

    assert caught.value.reason
    assert caught.value.reason in str(caught.value)


def test_a_pattern_of_aliases_is_listed_name_by_name() -> None:
    assert parse_points(["hidden_states[*]"], TINY).aliases == {
        "hidden_states[0]": "resid_pre.0",
        "hidden_states[1]": "resid_pre.1",
        "hidden_states[2]": "ln_f",
    }
    assert parse_points(["blocks.0:2.attn.hook_z[1]"], TINY).aliases == {
        "blocks.0.attn.hook_z[1]": "z.0[1]",
        "blocks.1.attn.hook_z[1]": "z.1[1]",
    }


def test_a_canonical_name_is_no_alias() -> None:
    assert parse_points(["embedding", "resid_post.*", "z.0[1]", "wte"], TINY).aliases == {}


@given(
    st.sampled_from(
        sorted(a for a in ALIASES if "scale" not in a and f"{a}[0]" not in ALIASES)  # h[3].output
    ),
    st.integers(0, 11),
    st.lists(st.integers(0, 11), unique=True, min_size=1, max_size=4),
)
@settings(deadline=None, max_examples=100)
def test_an_alias_with_units_names_the_same_units(
    template: str, layer: int, units: list[int]
) -> None:
    alias = template.replace("{l}", str(layer))
    whole = parse_points([alias], GPT2).points

    narrowed = parse_points([f"{alias}[{','.join(map(str, units))}]"], GPT2).points

    assert narrowed == tuple(Point(one.name, one.layer, tuple(units)) for one in whole)
