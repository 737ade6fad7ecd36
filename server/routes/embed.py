"""`/v1/embed`: the lookup alone, without a session. The event loop; the lookup on a worker."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response

from embedding.lookup import embed_parts
from embedding.positions import positions_for
from embedding.tables import EmbeddingTables
from embedding.text import IncrementalText
from embedding.tokenizer import Tokenizer
from engine.commands import Capture
from engine.events import StepRecord, Usage
from model.errors import UnknownPoint
from model.points import Point, Selection, parse_points
from server.answers import EmbedSteps, documented
from server.desk import Route, TheService, form_of, record_stream
from server.errors import blaming
from server.host import Service
from server.inputs import Report, check_token_ids, new_report, token_ids_of
from server.negotiation import Form
from server.problems import problem
from server.schemas import EmbedBody
from server.streaming import Batch, Ending, Source, WholeAnswer, steps_json
from server.wire import usage_json

router = APIRouter(prefix="/v1", tags=["embed"], route_class=Route)

LOOKED_UP = ("wte", "wpe", "embedding")
"""The points that need no block."""

_BATCH = 64  # tokens looked up at once on a stream


@router.post("/embed", **documented(EmbedSteps, streams=True))
async def embed(service: TheService, request: Request, body: EmbedBody) -> Response:
    """Token row, position row and their sum, for tokens at an explicit `past_length`."""
    engine = service.engine
    report = _report(service, body, form_of(request, stream=body.stream))
    check_token_ids(body, engine.tokenizer)
    token_ids = await token_ids_of(body, engine.tokenizer)
    with blaming(body.given or "prompt"):
        positions_for(body.past_length, len(token_ids), service.facts.config.n_ctx)
    lookup = Lookup(engine.model.tables, engine.tokenizer, token_ids, body.past_length, report)
    with ExitStack() as life:
        room = life.enter_context(service.answers.lease())
        limit = report.limit(service.settings.max_response_bytes, room.grow)
        if limit is None:
            return _stream(service, lookup)
        limit.take(n_records=len(token_ids), n_full=len(token_ids))
        return _answer(service, lookup, life.pop_all())


class Lookup:
    """The records of one request, made in batches that are asked for."""

    def __init__(
        self,
        tables: EmbeddingTables,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        past_length: int,
        report: Report,
    ) -> None:
        self.report = report
        self._tables = tables
        self._tokenizer = tokenizer
        self._token_ids = token_ids
        self._past_length = past_length
        self._text = IncrementalText()

    def all(self) -> list[StepRecord]:
        """Every record. Any thread, once."""
        return self._records(range(len(self._token_ids)))

    async def pieces(self) -> AsyncGenerator[Batch | Ending, None]:
        """The records as a stream."""
        n_tokens = len(self._token_ids)
        for start in range(0, n_tokens, _BATCH):
            batch = range(start, min(start + _BATCH, n_tokens))
            yield Batch(await asyncio.to_thread(self._records, batch))
        usage = usage_json(Usage(steps=n_tokens))
        yield Ending({"object": "done", "session": None, "usage": usage, **self.report.aliases})

    def _records(self, batch: range) -> list[StepRecord]:
        token_ids = self._token_ids[batch.start : batch.stop]
        parts = embed_parts(self._tables, token_ids, self._past_length + batch.start)
        rows = {name: getattr(parts, name).numpy() for name in LOOKED_UP}
        return [
            self._record(index, {name: array[t] for name, array in rows.items()})
            for t, index in enumerate(batch)
        ]

    def _record(self, index: int, rows: Mapping[str, npt.NDArray[np.float32]]) -> StepRecord:
        token_id = self._token_ids[index]
        text = self._text.push(self._tokenizer.token_bytes(token_id))
        if index == len(self._token_ids) - 1:
            text += self._text.flush()
        return StepRecord(
            index=index,
            position=self._past_length + index,
            token_id=token_id,
            text=text,
            points={
                point: point.select(rows[_row_of(point)]) for point in self.report.capture.points
            },
        )


def _stream(service: Service, lookup: Lookup) -> Response:
    async def started() -> None:
        """There is nothing to wait for."""

    async def failed(error: Exception) -> Mapping[str, Any]:
        return {"error": problem(error).error, "session": None}

    source = Source(started=started, pieces=lookup.pieces, failed=failed)
    n_bytes = lookup.report.bytes_per_record
    life = service.holding(_BATCH * n_bytes)
    return record_stream(service, source, lookup.report, life, largest_record=n_bytes)


def _answer(service: Service, lookup: Lookup, life: ExitStack) -> Response:
    async def work() -> list[bytes]:
        return await steps_json(
            {"object": "steps"},
            await asyncio.to_thread(lookup.all),
            lookup.report.aliases,
            wire=service.wire,
            encoding=lookup.report.encoding,
            bytes_per_record=lookup.report.bytes_per_record,
        )

    return WholeAnswer(work, life=life, write_timeout=service.settings.write_timeout)


def _report(service: Service, body: EmbedBody, form: Form) -> Report:
    config = service.facts.config
    selection = _looked_up(parse_points(body.points, config))
    capture = Capture(points=selection.points)
    return new_report(selection, capture, form, body.encoding_format, config)


def _looked_up(selection: Selection) -> Selection:
    for point in selection.points:
        if not point.is_looked_up:
            raise UnknownPoint(str(point), nearest=LOOKED_UP)
    return selection


def _row_of(point: Point) -> str:
    """`resid_pre.0`, the first block's input, is the embedding."""
    return "embedding" if point.name == "resid_pre" else point.name
