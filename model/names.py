"""What other systems call the points, and which of their names are none: tables. Any thread.

`{l}` stands for the layer and `{last}` for the last one. Every alias was compared with its point
by value, in TransformerLens 4.3 (a TransformerBridge of a GPT-2 without compatibility mode, with
`use_attn_result`) and in transformers 5 (eager attention); but for `attn.qkv.hook_in` and
`.hook_out`, which never fire there.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a point is. In its `pattern` `{l}` says that there is one for each layer.

    `stage`: before the blocks 0, within them 1, after them 2, products with the head 3 and 4.
    """

    pattern: str
    stage: int
    axes: tuple[str, ...]

    @property
    def name(self) -> str:
        """The pattern without its layer."""
        return self.pattern.removesuffix(".{l}")


def _kinds(stage: int, axes: str, patterns: str) -> Iterator[Kind]:
    for pattern in patterns.split():
        yield Kind(pattern=pattern, stage=stage, axes=tuple(axes.split()))


_FORWARD = (
    *_kinds(0, "n_embd", "wte wpe embedding"),
    *_kinds(1, "n_embd", "resid_pre.{l}"),
    *_kinds(1, "one", "ln_1_scale.{l}"),
    *_kinds(1, "n_embd", "ln_1_normalized.{l} ln_1.{l}"),
    *_kinds(1, "n_head d_head", "q.{l} k.{l} v.{l}"),
    *_kinds(1, "n_head key", "scores.{l} pattern.{l}"),
    *_kinds(1, "n_head d_head", "z.{l}"),
    *_kinds(1, "n_head n_embd", "head_out.{l}"),
    *_kinds(1, "n_embd", "attn_out.{l} resid_mid.{l}"),
    *_kinds(1, "one", "ln_2_scale.{l}"),
    *_kinds(1, "n_embd", "ln_2_normalized.{l} ln_2.{l}"),
    *_kinds(1, "n_inner", "mlp_pre.{l} mlp_post.{l}"),
    *_kinds(1, "n_embd", "mlp_out.{l} resid_post.{l}"),
    *_kinds(2, "one", "ln_f_scale"),
    *_kinds(2, "n_embd", "ln_f_normalized ln_f"),
    *_kinds(3, "id_logit top", "lens.{l}"),
    *_kinds(4, "n_vocab", "logits"),
)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in _FORWARD}
"""Every point by name, in the order in which a step computes them."""

_TRANSFORMER_LENS: Mapping[str, tuple[str, ...]] = {
    "wte": ("hook_embed", "embed.hook_out"),
    "wpe": ("hook_pos_embed", "pos_embed.hook_out"),
    "resid_pre.{l}": ("blocks.{l}.hook_resid_pre", "blocks.{l}.hook_in", "blocks.{l}.ln1.hook_in"),
    "ln_1_scale.{l}": ("blocks.{l}.ln1.hook_scale",),
    "ln_1_normalized.{l}": ("blocks.{l}.ln1.hook_normalized",),
    "ln_1.{l}": (
        "blocks.{l}.ln1.hook_out",
        "blocks.{l}.attn.hook_in",
        "blocks.{l}.attn.qkv.hook_in",
        "blocks.{l}.attn.q.hook_in",
        "blocks.{l}.attn.k.hook_in",
        "blocks.{l}.attn.v.hook_in",
    ),
    "q.{l} k.{l} v.{l}": ("blocks.{l}.attn.qkv.hook_out",),
    "q.{l}": ("blocks.{l}.attn.hook_q", "blocks.{l}.attn.q.hook_out"),
    "k.{l}": ("blocks.{l}.attn.hook_k", "blocks.{l}.attn.k.hook_out"),
    "v.{l}": ("blocks.{l}.attn.hook_v", "blocks.{l}.attn.v.hook_out"),
    "scores.{l}": ("blocks.{l}.attn.hook_attn_scores", "attn_scores.{l}"),
    "pattern.{l}": ("blocks.{l}.attn.hook_pattern", "attn.{l}", "attn_probs.{l}"),
    "z.{l}": ("blocks.{l}.attn.hook_z", "blocks.{l}.attn.o.hook_in"),
    "head_out.{l}": ("blocks.{l}.attn.hook_result",),
    "attn_out.{l}": (
        "blocks.{l}.hook_attn_out",
        "blocks.{l}.attn.hook_out",
        "blocks.{l}.attn.hook_hidden_states",
        "blocks.{l}.attn.o.hook_out",
    ),
    "resid_mid.{l}": ("blocks.{l}.hook_resid_mid", "blocks.{l}.ln2.hook_in"),
    "ln_2_scale.{l}": ("blocks.{l}.ln2.hook_scale",),
    "ln_2_normalized.{l}": ("blocks.{l}.ln2.hook_normalized",),
    "ln_2.{l}": (
        "blocks.{l}.ln2.hook_out",
        "blocks.{l}.mlp.hook_in",
        "blocks.{l}.mlp.in.hook_in",
    ),
    "mlp_pre.{l}": ("blocks.{l}.mlp.hook_pre", "blocks.{l}.mlp.in.hook_out"),
    "mlp_post.{l}": ("blocks.{l}.mlp.hook_post", "blocks.{l}.mlp.out.hook_in"),
    "mlp_out.{l}": (
        "blocks.{l}.hook_mlp_out",
        "blocks.{l}.mlp.hook_out",
        "blocks.{l}.mlp.out.hook_out",
    ),
    "resid_post.{l}": ("blocks.{l}.hook_resid_post", "blocks.{l}.hook_out"),
    "resid_post.{last}": ("ln_final.hook_in",),
    "ln_f_scale": ("ln_final.hook_scale",),
    "ln_f_normalized": ("ln_final.hook_normalized",),
    "ln_f": ("ln_final.hook_out", "unembed.hook_in"),
    "logits": ("unembed.hook_out", "hook_unembed"),
}

# Inputs and outputs of the modules of Hugging Face's GPT2LMHeadModel, which are nnsight's names.
_MODULES: Mapping[str, tuple[str, ...]] = {
    "wte": ("transformer.wte.output",),
    "wpe": ("transformer.wpe.output",),
    "embedding": ("transformer.drop.output",),
    "resid_pre.{l}": ("transformer.h.{l}.input", "transformer.h.{l}.ln_1.input"),
    "ln_1.{l}": (
        "transformer.h.{l}.ln_1.output",
        "transformer.h.{l}.attn.input",
        "transformer.h.{l}.attn.c_attn.input",
    ),
    "q.{l} k.{l} v.{l}": ("transformer.h.{l}.attn.c_attn.output",),
    "pattern.{l}": ("transformer.h.{l}.attn.output[1]",),
    "z.{l}": ("transformer.h.{l}.attn.c_proj.input",),
    "attn_out.{l}": (
        "transformer.h.{l}.attn.output[0]",
        "transformer.h.{l}.attn.c_proj.output",
        "transformer.h.{l}.attn.resid_dropout.output",
    ),
    "resid_mid.{l}": ("transformer.h.{l}.ln_2.input",),
    "ln_2.{l}": (
        "transformer.h.{l}.ln_2.output",
        "transformer.h.{l}.mlp.input",
        "transformer.h.{l}.mlp.c_fc.input",
    ),
    "mlp_pre.{l}": ("transformer.h.{l}.mlp.c_fc.output", "transformer.h.{l}.mlp.act.input"),
    "mlp_post.{l}": ("transformer.h.{l}.mlp.act.output", "transformer.h.{l}.mlp.c_proj.input"),
    "mlp_out.{l}": (
        "transformer.h.{l}.mlp.output",
        "transformer.h.{l}.mlp.c_proj.output",
        "transformer.h.{l}.mlp.dropout.output",
    ),
    # [0] is the whole output of transformers 4, and the first of the batch in transformers 5.
    "resid_post.{l}": ("transformer.h.{l}.output", "transformer.h.{l}.output[0]"),
    "resid_post.{last}": ("transformer.ln_f.input",),
    "ln_f": ("transformer.ln_f.output", "lm_head.input"),
    "logits": ("lm_head.output",),
}

HIDDEN_STATES = "hidden_states[{l}]"
"""Of Hugging Face, n_layer + 1 of them: `resid_pre.l`, and the last is `ln_f`."""

_OUTPUTS: Mapping[str, tuple[str, ...]] = {
    "resid_pre.{l}": (HIDDEN_STATES,),
    "pattern.{l}": ("attentions[{l}]",),
}


def _spellings(module: str) -> Iterator[str]:
    """With and without `transformer.`, `h.{l}` and `h[{l}]`; an output is the module's own name."""
    for name in (module, module.removeprefix("transformer.")):
        for spelled in (name, name.replace("h.{l}", "h[{l}]")):
            yield spelled
            yield re.sub(r"\.output(\[0\])?$", "", spelled)


def _aliases() -> Iterator[tuple[str, tuple[str, ...]]]:
    for table in (_TRANSFORMER_LENS, _OUTPUTS):
        yield from ((name, tuple(to.split())) for to, names in table.items() for name in names)
    for to, modules in _MODULES.items():
        for module in modules:
            yield from ((name, tuple(to.split())) for name in _spellings(module))


ALIASES: Mapping[str, tuple[str, ...]] = dict(_aliases())
"""Another system's name to the canonical one, or to three of them: q, k and v in one tensor."""

_ONE_BRANCH = re.compile(
    r"blocks\.\{l\}\.(ln[12]|attn\.[qkv])\.hook_in|(transformer\.)?h(\.\{l\}|\[\{l\}\])\.ln_[12]\.input"
)

_REFUSED: Mapping[str, str] = {
    r"blocks\.\{l\}\.(attn\.)?hook_([qkv]_input|attn_in)": (
        "it exists only under TransformerLens' use_split_qkv_input or use_attn_in, as one copy of "
        "resid_pre for each head: read resid_pre, edit q, k or v"
    ),
    r"blocks\.\{l\}\.hook_mlp_in": (
        "it exists only under TransformerLens' use_hook_mlp_in, as a copy of resid_mid for the "
        "MLP: read resid_mid, edit ln_2"
    ),
    r"([Wb]_\w+|(blocks\.\{l\}\.)?(attn|mlp|ln[12]|ln_final|(pos_|un)?embed)\.[Wbw](_\w+)?)": (
        "it is a weight, which TransformerLens by default folds and centres, and no tensor of a "
        "step: read it as it is at GET /v1/models/{id}/parameters"
    ),
    r".*\.(weight|bias|attn\.(QK|OV))": (
        "it is made of weights and no tensor of a step: GET /v1/models/{id}/parameters"
    ),
    r"(hook_tokens|(pos_)?embed\.hook_in|(transformer\.)?w[tp]e\.input)": (
        "it is the token id or the position, which every record has"
    ),
    r"(transformer\.)?h(\.\{l\}|\[\{l\}\])\.attn\.output": (
        "it is a tuple: output[0] is attn_out and output[1] is pattern"
    ),
    r"past_key_values.*": "what a step adds to the cache are its k and v",
    r"blocks\.\{l\}\.attn\.hook_rot_[qk]": (
        "GPT-2 rotates nothing: its positions are the rows of wpe"
    ),
    r"blocks\.\{l\}\.(mlp\.(hook_pre_linear|hook_mid|hook_gate|gate|ln)|attn\.[qk]_norm|ln[12]_post"
    r"|cross_attn|hook_cross_attn_\w+|hook_resid_mid2|hook_normalized_resid_post)(\..*)?": (
        "GPT-2 has no gated MLP, no cross-attention and no further norms"
    ),
    r"hook_(full_embed|token_type_embed)|token_type_embed\..*": (
        "GPT-2 adds no token types and no norm to its embedding: read embedding"
    ),
}
_REFUSALS = tuple((re.compile(pattern), reason) for pattern, reason in _REFUSED.items())


def refusal(template: str) -> str:
    """Why a name that other systems have is no point of a step; empty for any other text."""
    return next((reason for regex, reason in _REFUSALS if regex.fullmatch(template)), "")


def is_one_branch(template: str) -> bool:
    """Whether an alias means what one reader of its point reads, while others pass by it.

    The same tensor to read, but not the same edit.
    """
    return _ONE_BRANCH.fullmatch(template) is not None
