"""The engine against `transformers`, whose modules are hooked and which caches nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from engine.commands import Capture
from model.names import HIDDEN_STATES
from model.points import Point, parse_points
from sessions.edits import Edit, Intervention
from tests.agreement import assert_agrees
from tests.engine.doubles import Gated
from tests.engine.editing import value as numbers
from tests.engine.rig import CONFIG, LIVELY, capture, ids_of, in_loop, running, some_ids
from tests.engine.situations import CHUNK, SITUATIONS, Seen, assert_named, in_company
from tests.hooked import NAMES, value, values
from tests.lively import in_transformers

PROMPT, N_NEW = some_ids(6, seed=4), 16


@pytest.fixture(scope="module")
def theirs() -> GPT2LMHeadModel:
    return in_transformers(LIVELY)


def names_of_layers() -> list[str]:
    """Every name in every layer, and the hidden state after the last."""
    layers = range(CONFIG.n_layer)
    last = HIDDEN_STATES.replace("{l}", str(CONFIG.n_layer))
    return sorted({last, *(name.replace("{l}", str(at)) for name in NAMES for at in layers)})


NAMES_OF_LAYERS = names_of_layers()
ASKED = Capture(points=parse_points(NAMES_OF_LAYERS, CONFIG).points)


def assert_as_hooked(seen: Seen, theirs: GPT2LMHeadModel) -> None:
    expected = values(theirs, seen.history)
    assert seen.records
    for name in NAMES_OF_LAYERS:
        assert_named(seen, name, value(name, expected), CONFIG)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("situation", SITUATIONS)
@in_loop
async def test_steps_have_what_the_modules_have(
    situation: str, exact: bool, theirs: GPT2LMHeadModel
) -> None:
    async with running(exact=exact, prefill_chunk=CHUNK) as rig:
        seen = await SITUATIONS[situation](rig, ASKED)
    assert_as_hooked(seen, theirs)


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@in_loop
async def test_so_do_steps_in_company(exact: bool, theirs: GPT2LMHeadModel) -> None:
    async with running(Gated, exact=exact, prefill_chunk=CHUNK) as rig:
        for seen in await in_company(rig, ASKED):
            assert_as_hooked(seen, theirs)


@contextmanager
def steered(model: GPT2LMHeadModel, layer: int, addend: Tensor, start: int) -> Iterator[None]:
    """Positions from `start` on leave a block with more in them."""

    def hook(_: nn.Module, __: object, output: Tensor) -> Tensor:
        output[:, start:] += addend
        return output

    handle = model.transformer.h[layer].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def greedy(model: GPT2LMHeadModel, prompt: list[int], n_new: int) -> tuple[list[int], Tensor]:
    """New ids, each from a full pass, and the logits [n_new, V] after each."""
    ids = list(prompt)
    for _ in range(n_new):
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    logits = model(torch.tensor([ids]), use_cache=False).logits[0, len(prompt) :]
    return ids[len(prompt) :], logits


@pytest.mark.parametrize("layer", range(CONFIG.n_layer))
@pytest.mark.parametrize("start", [len(PROMPT), len(PROMPT) + 5])
@in_loop
async def test_steering_under_generate_is_hooks_without_a_cache(
    layer: int, start: int, theirs: GPT2LMHeadModel
) -> None:
    vector = np.random.default_rng(1).normal(size=CONFIG.n_embd).astype(np.float32)
    edit = Edit(point=f"resid_post.{layer}", op="add", value=numbers(vector), scale=2.5)
    steering = (Intervention(edit=edit, spans=((start, None),)),)
    with steered(theirs, layer, 2.5 * torch.from_numpy(vector), start):
        ids, logits = greedy(theirs, PROMPT, N_NEW)
    plain, _ = greedy(theirs, PROMPT, N_NEW)
    n_alike = start - len(PROMPT) + 1
    assert ids[:n_alike] == plain[:n_alike]
    assert ids[n_alike:] != plain[n_alike:]

    async with running() as rig:
        done = await rig.generated(
            await rig.open(PROMPT),
            N_NEW,
            ignore_eos=True,
            interventions=steering,
            capture=capture(Point("logits")),
        )
    assert ids_of(done.records) == ids
    for record, row in zip(done.records, logits, strict=True):
        assert_agrees(record.points[Point("logits")], row)
