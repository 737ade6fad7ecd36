"""tests.reference against `transformers`: the oracle's oracle."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from model.config import SIZES, GPT2Config
from model.weights.checkpoint import Checkpoint
from model.weights.huggingface import load_huggingface
from tests.agreement import assert_agrees, assert_same_greedy
from tests.lively import SMALL, in_transformers, lively_checkpoint, save_lively
from tests.model.editing import project, replace, scale
from tests.reference import reference_logits, reference_points

CONFIGS = [
    SMALL,
    GPT2Config(n_ctx=40, n_embd=24, n_layer=1, n_head=1),
    GPT2Config(n_ctx=64, n_embd=48, n_layer=3, n_head=4, layer_norm_epsilon=1e-3),
    GPT2Config(n_ctx=64, n_embd=64, n_layer=4, n_head=8),
]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def ids_of(n: int, seed: int = 11) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, 50257, (n,), generator=generator).tolist()
    return ids


def theirs_of(directory: Path, dtype: torch.dtype = torch.float32) -> GPT2LMHeadModel:
    model: GPT2LMHeadModel = GPT2LMHeadModel.from_pretrained(
        directory, attn_implementation="eager", dtype=dtype
    )
    return model


INPUTS = {
    "resid_pre.{l}": "h.{l}",
    "z.{l}": "h.{l}.attn.c_proj",
    "resid_mid.{l}": "h.{l}.ln_2",
}
OUTPUTS = {
    "wte": "wte",
    "wpe": "wpe",
    "embedding": "drop",
    "ln_1.{l}": "h.{l}.ln_1",
    "qkv.{l}": "h.{l}.attn.c_attn",
    "attn_out.{l}": "h.{l}.attn",
    "ln_2.{l}": "h.{l}.ln_2",
    "mlp_pre.{l}": "h.{l}.mlp.c_fc",
    "mlp_post.{l}": "h.{l}.mlp.act",
    "mlp_out.{l}": "h.{l}.mlp",
    "resid_post.{l}": "h.{l}",
    "ln_f": "ln_f",
}


def everything_of(model: GPT2LMHeadModel, ids: list[int]) -> dict[str, Tensor]:
    """What hooks on `transformers` see, by our names, each [T, ...]."""
    seen: dict[str, Tensor] = {}

    def take(name: str, passed: Tensor | tuple[Tensor, ...]) -> None:
        seen[name] = (passed if isinstance(passed, Tensor) else passed[0])[0]

    for layer in range(model.config.n_layer):
        for table in (INPUTS, OUTPUTS):
            for pattern, path in table.items():
                name = pattern.replace("{l}", str(layer))
                module = model.get_submodule("transformer." + path.replace("{l}", str(layer)))
                if table is INPUTS:
                    module.register_forward_pre_hook(lambda _, args, name=name: take(name, args))
                else:
                    module.register_forward_hook(lambda _, __, out, name=name: take(name, out))
    output = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
    heads = (len(ids), model.config.n_head, -1)
    for layer, attention in enumerate(output.attentions):
        parts = seen.pop(f"qkv.{layer}").chunk(3, dim=-1)
        for name, part in zip("qkv", parts, strict=True):
            seen[f"{name}.{layer}"] = part.reshape(heads)
        seen[f"z.{layer}"] = seen[f"z.{layer}"].reshape(heads)
        seen[f"pattern.{layer}"] = attention[0].transpose(0, 1)
    return seen | {"logits": output.logits[0]}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.n_embd}x{config.n_layer}")
def test_every_point_agrees_with_transformers(config: GPT2Config, tmp_path: Path) -> None:
    checkpoint = save_lively(tmp_path, config)
    ids = ids_of(config.n_ctx)

    expected = everything_of(theirs_of(tmp_path), ids)
    points = reference_points(checkpoint, ids)

    derived = ("scores", "head_out", "lens", "_scale", "_normalized")
    assert set(expected) == {name for name in points if not any(own in name for own in derived)}
    for name, theirs in expected.items():
        assert_agrees(points[name], theirs, what=name)
    assert_same_greedy(points["logits"], expected["logits"])


def test_what_transformers_has_no_hook_for_is_what_its_definition_says() -> None:
    """Parts that make up a point which does agree."""
    checkpoint = lively_checkpoint()
    weights, points = checkpoint.tensors, reference_points(checkpoint, ids_of(9))

    for layer in (0, 1):
        q, k, scores = (points[f"{name}.{layer}"] for name in ("q", "k", "scores"))
        assert_agrees(scores[7, 1, 3], q[7, 1] @ k[3, 1] / 4)
        assert (scores[3, :, 4:] == -torch.inf).all()
        assert_agrees(scores.softmax(-1), points[f"pattern.{layer}"])
        heads, bias = points[f"head_out.{layer}"], weights[f"h.{layer}.attn.c_proj.bias"]
        assert_agrees(heads.sum(1) + bias, points[f"attn_out.{layer}"])
        alone = points[f"z.{layer}"].clone()
        alone[:, 0] = 0
        alone = alone.flatten(1) @ weights[f"h.{layer}.attn.c_proj.weight"]
        assert_agrees(heads[:, 1], alone)
        for ln, stream in (("ln_1", "resid_pre"), ("ln_2", "resid_mid")):
            assert_is_normalized(points, f".{layer}", ln, points[f"{stream}.{layer}"])
    assert_is_normalized(points, "", "ln_f", points["resid_post.1"])
    assert_agrees(points["lens.1"], points["ln_f"])
    own = torch.nn.functional.layer_norm(
        points["resid_post.0"], (32,), weights["ln_f.weight"], weights["ln_f.bias"]
    )
    assert_agrees(points["lens.0"], own)


def assert_is_normalized(points: dict[str, Tensor], own: str, ln: str, x: Tensor) -> None:
    scale, normalized = points[f"{ln}_scale{own}"], points[f"{ln}_normalized{own}"]
    assert_agrees(scale, (x.var(dim=-1, correction=0, keepdim=True) + 1e-5).sqrt())
    assert_agrees(normalized * scale + x.mean(dim=-1, keepdim=True), x)


def test_edits_are_what_hooks_would_do() -> None:
    """In `transformers`, for one edit of each kind that its modules can be hooked for."""
    checkpoint = lively_checkpoint()
    ids, steering = ids_of(9), torch.linspace(-1, 1, 32)
    theirs = in_transformers(checkpoint)

    def edit_qkv(_: object, __: object, output: Tensor) -> Tensor:
        output[0, 2, 32:48] = 1.0  # key of head 0 at position 2
        return output

    def edit_z(_: object, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        args[0][0, 4, 16:] *= 0.0  # head 1 at position 4
        return args

    def edit_output(_: object, __: object, output: Tensor) -> Tensor:
        direction = steering / steering.norm()
        output[0, 6] += -(output[0, 6] @ direction) * direction
        return output

    theirs.get_submodule("transformer.h.0.attn.c_attn").register_forward_hook(edit_qkv)
    theirs.get_submodule("transformer.h.1.attn.c_proj").register_forward_pre_hook(edit_z)
    theirs.get_submodule("transformer.h.1.mlp").register_forward_hook(edit_output)
    edits = {
        2: (replace("k.0[0]", torch.ones(1, 16)),),
        4: (scale("z.1[1]", 0.0),),
        6: (project("mlp_out.1", steering.tolist(), 0.0),),
    }

    points = reference_points(checkpoint, ids, edits=edits)

    assert_agrees(points["logits"], theirs(torch.tensor([ids])).logits[0])
    plain = reference_points(checkpoint, ids)
    for position in edits:
        assert (points["logits"] - plain["logits"])[position].abs().max() > 0.01


def test_w02_logits_are_ln_f_times_the_token_table(tmp_path: Path) -> None:
    """Saved files carry no lm_head; the output is tied."""
    checkpoint = save_lively(tmp_path)
    points = reference_points(checkpoint, ids_of(8))

    assert torch.equal(points["logits"], points["ln_f"] @ checkpoint.tensors["wte.weight"].T)
    assert_agrees(points["logits"], theirs_of(tmp_path)(torch.tensor([ids_of(8)])).logits[0])


def test_the_full_gpt2_shape_agrees_with_transformers() -> None:
    checkpoint = lively_checkpoint(SIZES["gpt2"])
    ids = ids_of(12)

    logits = reference_logits(checkpoint, ids)

    expected = in_transformers(checkpoint)(torch.tensor([ids])).logits[0]
    assert_agrees(logits, expected)
    assert_same_greedy(logits, expected)


def test_a_giant_entry_at_position_0_agrees_too(tmp_path: Path) -> None:
    """Trained GPT-2 has entries near 3,000 at the first position."""
    save_lively(tmp_path)
    theirs = theirs_of(tmp_path)
    theirs.transformer.wpe.weight[0, 7] = 3000.0
    theirs.save_pretrained(tmp_path)
    checkpoint = load_huggingface(tmp_path, source="giant")

    points = reference_points(checkpoint, ids_of(20))
    output = theirs(torch.tensor([ids_of(20)]), output_hidden_states=True)

    assert points["embedding"][0].max() > 2999
    assert_agrees(points["resid_pre.1"], output.hidden_states[1][0])
    assert_agrees(points["logits"], output.logits[0])


def test_positions_decide() -> None:
    """The comparison above would see a twin that restarts positions at 0."""
    checkpoint = lively_checkpoint()
    right, restarted = (
        reference_logits(checkpoint, ids_of(6), positions=positions)
        for positions in (None, [0, 1, 2, 3, 0, 0])
    )

    assert_agrees(restarted[:4], right[:4])
    with pytest.raises(AssertionError):
        assert_agrees(restarted[4:], right[4:])


def test_w06_half_weights_agree_within_tolerance(tmp_path: Path) -> None:
    """Half files are computed in float32, from the rounded numbers that they hold."""
    for dtype in (torch.float16, torch.bfloat16):
        save_lively(tmp_path)
        theirs_of(tmp_path, dtype).save_pretrained(tmp_path)
        checkpoint = load_huggingface(tmp_path, source="half")

        expected = theirs_of(tmp_path)(torch.tensor([ids_of(10)])).logits[0]
        assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {torch.float32}
        assert_agrees(reference_logits(checkpoint, ids_of(10)), expected)


def test_one_weight_matters() -> None:
    checkpoint = lively_checkpoint()
    changed = _with(checkpoint, "h.1.attn.c_attn.bias", checkpoint.tensors["ln_f.bias"].repeat(3))

    with pytest.raises(AssertionError):
        assert_agrees(*(reference_logits(each, ids_of(5)) for each in (changed, checkpoint)))


def _with(checkpoint: Checkpoint, name: str, tensor: Tensor) -> Checkpoint:
    return dataclasses.replace(checkpoint, tensors={**checkpoint.tensors, name: tensor})
