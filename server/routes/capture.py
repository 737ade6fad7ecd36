"""`/v1/capture`: many prompts to their activations, as frames. The event loop; texts on workers."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from engine.commands import Capture
from engine.errors import EngineError
from engine.events import Usage
from engine.studies.bulk import Bulk, Prompt, PromptActivations
from engine.studies.flow import WINDOW
from engine.studies.rows import n_keys
from model.config import GPT2Config
from model.points import Selection, parse_points
from server.answers import documented_tensors
from server.desk import Route, TheService, form_of, record_stream
from server.errors import AnswerTooLarge, InvalidRequest, NotSupported
from server.host import Service
from server.inputs import Report, new_report
from server.interventions.plan import check_masks, plan_of
from server.interventions.values import resolve
from server.negotiation import Form
from server.problems import problem
from server.streaming import Batch, Ending, Source
from server.studies.bodies import CaptureBody
from server.studies.prompts import check_reach, prompts_of
from server.wire import Message, Tensor, usage_json

router = APIRouter(prefix="/v1", tags=["inside"], route_class=Route)

_HEAD_BYTES = 32 * 1024  # of a frame without its numbers: ids and positions of a whole context


@router.post("/capture", **documented_tensors(Form.FRAMES))
async def capture_prompts(service: TheService, request: Request, body: CaptureBody) -> Response:
    """Step prompts that nobody keeps, and send what they had inside: a frame each, in order."""
    _check_form(request)
    config, tokenizer = service.facts.config, service.engine.tokenizer
    selection = _captured(body, config)
    prompts = await asyncio.to_thread(prompts_of, body, tokenizer, config.n_ctx)
    plan = await plan_of(body.interventions, config)
    check_reach(plan, prompts)
    check_masks(plan, range(max(len(prompt.token_ids) for prompt in prompts)))
    bulk = Bulk(
        points=selection.points,
        mean=body.reduce == "mean",
        dtype=np.float16 if body.dtype == "float16" else np.float32,
        interventions=await resolve(service, plan),
    )
    return _stream(service, bulk, prompts, _report(selection, config))


def _check_form(request: Request) -> None:
    """Whoever accepts anything gets frames."""
    form = form_of(request)
    if form not in (Form.JSON, Form.FRAMES):
        raise NotSupported(
            f"{form.value} is not what a capture is sent as: accept {Form.FRAMES.value}",
            param="Accept",
        )


def _captured(body: CaptureBody, config: GPT2Config) -> Selection:
    selection = parse_points(body.points, config)
    for point in selection.points:
        if body.reduce == "mean" and (point.is_ragged or point.name == "lens"):
            raise InvalidRequest(f"{point} has no mean over positions", param="points")
    return selection


def _report(selection: Selection, config: GPT2Config) -> Report:
    capture = Capture(points=selection.points)
    return new_report(selection, capture, Form.FRAMES, "base64", config)


def _largest_frame(service: Service, bulk: Bulk, prompts: Sequence[Prompt]) -> int:
    """Bytes of it, from above.

    Raises:
        AnswerTooLarge: it would be.
    """
    max_bytes = service.settings.max_response_bytes
    largest = max(bulk.n_bytes(prompt, service.facts.config) for prompt in prompts) + _HEAD_BYTES
    if largest > max_bytes:
        raise AnswerTooLarge(n_bytes=largest, max_bytes=max_bytes, param="points")
    return largest


def _stream(service: Service, bulk: Bulk, prompts: Sequence[Prompt], report: Report) -> Response:
    """As many prompts are at work, or wait to be read, as one answer has room for."""
    largest = _largest_frame(service, bulk, prompts)
    window = min(WINDOW, service.settings.max_response_bytes // largest)
    stream = _Stream(service, bulk, prompts, report, window)
    source = Source(
        started=stream.started, pieces=stream.pieces, failed=stream.failed, close=stream.close
    )
    life = service.holding(window * largest)
    return record_stream(service, source, report, life, largest_record=largest)


class _Stream:
    """Frames in order."""

    _first: PromptActivations

    def __init__(
        self, service: Service, bulk: Bulk, prompts: Sequence[Prompt], report: Report, window: int
    ) -> None:
        self._bulk = bulk
        self._report = report
        self._all = bulk.run(service.engine, prompts, service.facts.config, window=window)
        self._n_sent = 0
        self._usage = Usage()

    async def started(self) -> None:
        """Until the first one is there everything may still be refused."""
        self._first = await anext(self._all)

    async def pieces(self) -> AsyncGenerator[Batch | Ending, None]:
        """A frame for each prompt."""
        yield Batch([self._message(self._first)])
        try:
            async for captured in self._all:
                yield Batch([self._message(captured)])
        except EngineError as error:
            yield Ending(await self.failed(error), failed=True)
        else:
            yield Ending(self._done())

    async def failed(self, error: Exception) -> Mapping[str, Any]:
        """The record that ends a stream badly."""
        return {"error": problem(error).error, "session": None}

    async def close(self) -> None:
        """End the prompts that are under way."""
        await self._all.aclose()

    def _done(self) -> dict[str, Any]:
        usage = usage_json(self._usage)
        return {"object": "done", "session": None, "usage": usage, **self._report.aliases}

    def _message(self, captured: PromptActivations) -> Message:
        self._usage = _sum(self._usage, captured.usage)
        head = {
            "object": "capture",
            "index": self._n_sent,
            "token_ids": captured.prompt.token_ids,
            "positions": captured.prompt.positions,
        }
        self._n_sent += 1
        return Message(head, _tensors(captured, mean=self._bulk.mean))


def _tensors(captured: PromptActivations, *, mean: bool) -> dict[str, Tensor]:
    """By name, with an axis of positions first; `n_keys` where some are padded on the right."""
    before = () if mean else ("position",)
    tensors = {
        str(point): Tensor(array, before + point.axes) for point, array in captured.arrays.items()
    }
    if (real := n_keys(captured.arrays, captured.prompt.positions)) is not None:
        tensors["n_keys"] = Tensor(real, before)
    return tensors


def _sum(a: Usage, b: Usage) -> Usage:
    return Usage(
        steps=a.steps + b.steps,
        cached_tokens=a.cached_tokens + b.cached_tokens,
        rebuilt_tokens=a.rebuilt_tokens + b.rebuilt_tokens,
    )
