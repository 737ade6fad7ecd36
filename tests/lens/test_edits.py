"""Interventions against functions that are hooked into TransformerLens at the same place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.commands import Capture
from model.errors import UnknownPoint
from model.points import Point, parse_point
from sessions.edits import Edit, Intervention, Op, Span
from tests.agreement import assert_agrees
from tests.engine.rig import CONFIG, LIVELY, Rig, ids_of, in_loop, running, some_ids
from tests.lens.oracle import Change, Lens
from tests.model.editing import OPS, add, drawn, mask, scale

pytestmark = pytest.mark.lens

IDS, PROMPT = some_ids(9, seed=3), some_ids(6, seed=4)
AT, N_NEW = 4, 16
LOGITS = Point("logits")

READ_ONLY = {"unembed.hook_out", "hook_unembed", "embed.hook_in", "pos_embed.hook_in"}
ONE_BRANCH = ("ln1.hook_in", "ln2.hook_in", "attn.q.hook_in", "attn.k.hook_in", "attn.v.hook_in")
ELSEWHERE = "hook_resid_mid"  # only what ln_2 reads, in a bridge


@pytest.fixture(scope="module")
def lens() -> Lens:
    return Lens(LIVELY)


@pytest.fixture(scope="module")
def hooks(lens: Lens) -> Sequence[str]:
    """Where an edit means the same in both systems."""
    fired = sorted(lens.activations([1]).keys() - READ_ONLY)
    return [name for name in fired if not name.endswith((*ONE_BRANCH, ELSEWHERE))]


def numbers(edit: Edit) -> Tensor:
    assert edit.value
    return torch.tensor(np.frombuffer(edit.value.data, "<f4").reshape(edit.value.shape))


def projected(x: Tensor, edit: Edit) -> Tensor:
    u = numbers(edit) / numbers(edit).square().sum().sqrt()
    return x + (edit.scale - 1) * (x * u).sum() * u


FUNCTIONS: Mapping[str, Callable[[Tensor, Edit], Tensor]] = {
    "replace": lambda x, edit: numbers(edit),
    "add": lambda x, edit: x + edit.scale * numbers(edit),
    "scale": lambda x, edit: edit.scale * x,
    "project": projected,
}


def as_hook(edit: Edit, positions: range) -> Change:
    """What the edit is in TransformerLens, whose activations hold all positions."""
    point = parse_point(edit.point, CONFIG)
    units = slice(None) if point.units is None else list(point.units)

    def change(activation: Tensor) -> Tensor:
        x = activation[0].clone()  # [T, ...], or [H, T, T]
        for at in positions:
            row = x[:, at, : at + 1] if point.axes[-1] == "key" else x[at]
            row[units] = FUNCTIONS[edit.op](row[units], edit)
        return x[None]

    return change


def drastic(name: str, op: Op, seed: int = 0) -> Edit:
    """An edit at `AT` that shows in the logits, whatever it is of."""
    return replace(drawn(str(parse_point(name, CONFIG)), op, AT, CONFIG, seed), scale=-2.0)


async def edited(rig: Rig, edits: Sequence[Edit], *spans: Span) -> np.ndarray:
    """Logits [T, V] of an append."""
    interventions = tuple(Intervention(edit=edit, spans=spans) for edit in edits)
    done = await rig.appended(
        await rig.open(), IDS, interventions=interventions, capture=Capture(points=(LOGITS,))
    )
    return np.stack([record.points[LOGITS] for record in done.records])


async def assert_same_effect(rig: Rig, lens: Lens, name: str, edit: Edit) -> None:
    """The edit at `AT` does what its function does at the hook, and that is something."""
    expected = lens.logits(IDS, {name: as_hook(edit, range(AT, AT + 1))})
    assert (expected - lens.logits(IDS)).abs().max() > 0.01, name
    assert_agrees(await edited(rig, [edit], (AT, AT + 1)), expected, what=f"{name} {edit.op}")


@pytest.mark.parametrize("op", OPS)
@in_loop
async def test_an_edit_is_a_function_at_the_hook(op: Op, lens: Lens, hooks: Sequence[str]) -> None:
    assert len(hooks) > 70
    async with running() as rig:
        for seed, name in enumerate(hooks):
            await assert_same_effect(rig, lens, name, drastic(name, op, seed))


UNITS = (
    "blocks.0.attn.hook_z[1]",
    "blocks.1.attn.hook_v[0]",
    "blocks.0.attn.hook_pattern[1]",
    "blocks.0.attn.hook_result[0]",
    "blocks.0.mlp.hook_post[7,100,3]",
    "blocks.0.hook_resid_post[0,31]",
)


@pytest.mark.parametrize("op", OPS)
@in_loop
async def test_so_it_is_of_heads_and_of_single_numbers(op: Op, lens: Lens) -> None:
    async with running() as rig:
        for name in UNITS:
            await assert_same_effect(rig, lens, name.partition("[")[0], drastic(name, op))


@in_loop
async def test_many_edits_at_many_positions(lens: Lens) -> None:
    one, other = torch.linspace(-2, 2, 32), torch.linspace(3, -1, 32)
    edits = {
        "blocks.0.attn.hook_z": scale("z.0[1]", 0.0),
        "blocks.0.hook_mlp_out": add("mlp_out.0", one, 1.5),
        "blocks.1.hook_attn_out": add("attn_out.1", other, -0.5),
        "ln_final.hook_scale": scale("ln_f_scale", 1.25),
    }
    changes = {name: as_hook(edit, range(3, len(IDS))) for name, edit in edits.items()}
    async with running(prefill_chunk=2) as rig:
        logits = await edited(rig, list(edits.values()), (3, None))
    assert_agrees(logits, lens.logits(IDS, changes))


@in_loop
async def test_resid_mid_is_edited_for_all_its_readers(lens: Lens) -> None:
    """The bridge's `hook_resid_mid` reaches only one of them; its `hook_attn_out` both."""
    edit = add("resid_mid.0", torch.linspace(-2, 2, 32))
    change = as_hook(edit, range(AT, AT + 1))
    one_reader = lens.logits(IDS, {"blocks.0.hook_resid_mid": change})
    both = lens.logits(IDS, {"blocks.0.hook_attn_out": change})
    assert (one_reader - both).abs().max() > 0.01
    async with running() as rig:
        assert_agrees(await edited(rig, [edit], (AT, AT + 1)), both)


def test_what_one_of_several_readers_takes_is_not_edited(lens: Lens) -> None:
    fired = lens.activations([1])
    for name in ONE_BRANCH:
        assert f"blocks.1.{name}" in fired
        with pytest.raises(UnknownPoint, match="other readers"):
            parse_point(f"blocks.1.{name}", CONFIG)


@pytest.mark.parametrize("heads", [(0, 1), (1,)])
@in_loop
async def test_masked_keys_are_scores_of_minus_infinity(heads: tuple[int, ...], lens: Lens) -> None:
    masked = [0, 2]

    def knock_out(scores: Tensor) -> Tensor:  # [1, H, T, T]
        scores = scores.clone()
        for head in heads:
            scores[:, head, AT:, masked] = -inf
        return scores

    units = f"[{','.join(map(str, heads))}]"
    edit = mask(f"scores.1{units}", (0, 1), (2, 3))
    expected = lens.logits(IDS, {"blocks.1.attn.hook_attn_scores": knock_out})
    assert (expected - lens.logits(IDS)).abs().max() > 0.01
    async with running() as rig:
        session_id = await rig.open()
        everywhere = Intervention(edit=edit, spans=((AT, None),))
        await rig.appended(session_id, IDS, interventions=(everywhere,))
        done = await rig.read(session_id, "logits", f"attn.1{units}")
    assert_agrees(np.stack([record.points[LOGITS] for record in done.records]), expected)
    for record in done.records[AT:]:
        assert not record.points[parse_point(f"pattern.1{units}", CONFIG)][:, masked].any()


@pytest.mark.parametrize("layer", range(CONFIG.n_layer))
@in_loop
async def test_steering_under_generate_is_a_hook_without_a_cache(layer: int, lens: Lens) -> None:
    name, start = f"blocks.{layer}.hook_resid_post", len(PROMPT) + 2
    edit = drastic(name, "add")

    def steer(residual: Tensor) -> Tensor:  # [1, T, C]
        residual = residual.clone()
        residual[:, start:] += edit.scale * numbers(edit)
        return residual

    expected = lens.greedy(PROMPT, N_NEW, {name: steer})
    assert expected != lens.greedy(PROMPT, N_NEW, {})
    async with running() as rig:
        done = await rig.generated(
            await rig.open(PROMPT),
            N_NEW,
            ignore_eos=True,
            interventions=(Intervention(edit=edit, spans=((start, None),)),),
        )
    assert ids_of(done.records) == expected
