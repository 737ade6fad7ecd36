"""`/v1/models`, as OpenAI has it, and `/v1/capabilities`. The event loop."""

from typing import Any

from fastapi import APIRouter, Response

from model.points import all_points
from server.answers import Capabilities, ModelCard, ModelList, documented
from server.desk import Route, TheService, json_response
from server.facts import ModelFacts
from server.negotiation import Form
from server.routes.tokens import check_model
from server.settings import Settings

router = APIRouter(prefix="/v1", tags=["models"], route_class=Route)


@router.get("/models", **documented(ModelList))
async def list_models(service: TheService) -> Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [_card(service.facts)]})


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
            "points": [str(point) for point in all_points(config)],
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
    )
    return {name: getattr(settings, name) for name in names}
