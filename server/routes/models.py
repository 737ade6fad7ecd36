"""`/v1/models`, as OpenAI has it, their weights, and `/v1/capabilities`. The event loop."""

import asyncio
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Query, Response

from model.config import GPT2Config
from model.points import all_points
from server.answers import documented, documented_tensors
from server.desk import Route, TheService, json_response
from server.errors import AnswerTooLarge, InvalidRequest, blaming
from server.facts import ModelFacts
from server.inputs import split_names
from server.interventions.bodies import MAX_INTERVENTIONS
from server.model_answers import Capabilities, ModelCard, ModelList
from server.negotiation import Form
from server.parameters import parameter
from server.routes.tokens import check_model
from server.settings import Settings
from server.streaming import WholeAnswer
from server.tensors import saved
from sessions.edits import Op

router = APIRouter(prefix="/v1", tags=["models"], route_class=Route)

MAX_NAMES_LENGTH = 32_768


@router.get("/models", **documented(ModelList))
async def list_models(service: TheService) -> Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [_card(service.facts)]})


@router.get("/models/{model_id:path}/parameters", **documented_tensors())
async def get_parameters(
    service: TheService, model_id: str, names: Annotated[str, Query(max_length=MAX_NAMES_LENGTH)]
) -> Response:
    """Tensors of the weights, or rows of them, in one safetensors file under the names asked for.

    Before the route of a model, whose name may hold a slash.
    """
    check_model(service, model_id)
    with blaming("names", InvalidRequest):
        named = {name: parameter(service.engine.model, name) for name in split_names(names)}
    n_bytes = sum(tensor.nbytes for tensor in named.values())
    max_bytes = service.settings.max_response_bytes
    if n_bytes > max_bytes:
        raise AnswerTooLarge(n_bytes=n_bytes, max_bytes=max_bytes, param="names")

    async def work() -> list[bytes]:
        arrays = {name: tensor.numpy() for name, tensor in named.items()}
        facts = {"model": service.facts.name, "fingerprint": service.facts.fingerprint}
        return [await asyncio.to_thread(saved, arrays, facts)]

    return WholeAnswer(
        work,
        life=service.holding(n_bytes),
        write_timeout=service.settings.write_timeout,
        form=Form.STACKED,
    )


@router.get("/models/{model_id:path}", **documented(ModelCard))
async def get_model(service: TheService, model_id: str) -> Response:
    """The model of this name, which may hold a slash."""
    check_model(service, model_id)
    return json_response(_card(service.facts))


@router.get("/capabilities", **documented(Capabilities))
async def get_capabilities(service: TheService) -> Response:
    """What this server can report, in which forms, within which limits."""
    facts, config = service.facts, service.facts.config
    kv = service.engine.stats().kv
    return json_response(
        {
            "model": facts.name,
            "fingerprint": facts.fingerprint,
            **_sizes(facts),
            **_precision(facts),
            **_points(config),
            "formats": [form.value for form in Form],
            "limits": _limits(service.settings),
            "kv": {
                "bytes_total": kv.bytes_total,
                "bytes_used": kv.bytes_used,
                "bytes_shared": kv.bytes_shared,
                "bytes_cached": kv.bytes_cached,
                "bytes_per_token": kv.bytes_per_token,
            },
        }
    )


def _points(config: GPT2Config) -> dict[str, Any]:
    points = all_points(config)
    return {
        "points": [str(point) for point in points],
        "points_that_cost_extra": [str(point) for point in points if point.costs_extra],
        "interventions": {
            "ops": list(get_args(Op)),
            "points": [str(point) for point in points if point.is_editable],
            "max_interventions": MAX_INTERVENTIONS,
        },
        "gradients": False,
    }


def _card(facts: ModelFacts) -> dict[str, Any]:
    return {
        "id": facts.name,
        "object": "model",
        "created": facts.created,
        "owned_by": "stepscope",
        "source": facts.source,
        "fingerprint": facts.fingerprint,
        **_precision(facts),
        "max_model_len": facts.config.n_ctx,
        **_sizes(facts),
    }


def _precision(facts: ModelFacts) -> dict[str, Any]:
    return {
        "dtype": facts.dtype,
        "kv_dtype": facts.kv_dtype,
        "batch_invariant": facts.batch_invariant,
    }


def _sizes(facts: ModelFacts) -> dict[str, int]:
    config = facts.config
    return {
        "n_ctx": config.n_ctx,
        "n_vocab": config.n_vocab,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
    }


def _limits(settings: Settings) -> dict[str, Any]:
    names = (
        "max_sessions",
        "session_ttl",
        "max_queue",
        "max_rows",
        "prefill_chunk",
        "max_response_bytes",
        "max_body_bytes",
        "record_budget",
        "edit_budget",
        "vector_budget",
    )
    return {name: getattr(settings, name) for name in names}
