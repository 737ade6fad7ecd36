"""`/tokenize` and `/detokenize`, as vLLM has them. The event loop.

https://docs.vllm.ai/en/stable/serving/openai_compatible_server/#tokenizer-api
"""

from fastapi import APIRouter, Response

from server.answers import Detokenized, Tokenized, documented
from server.desk import Route, TheService, json_response
from server.errors import ModelNotFound, blaming
from server.host import Service
from server.inputs import encode
from server.schemas import DetokenizeBody, TokenizeBody

router = APIRouter(tags=["tokens"], route_class=Route)


@router.post("/tokenize", **documented(Tokenized))
async def tokenize(service: TheService, body: TokenizeBody) -> Response:
    """Text to ids. Nothing is added: GPT-2 has no token that begins a text."""
    check_model(service, body.model)
    with blaming("prompt"):
        token_ids = await encode(service.tokenizer, body.prompt, allow_special=body.allow_special)
    pieces = [service.tokenizer.piece(i) for i in token_ids] if body.return_token_strs else None
    return json_response(
        {
            "count": len(token_ids),
            "max_model_len": service.facts.config.n_ctx,
            "tokens": token_ids,
            "token_strs": pieces,
        }
    )


@router.post("/detokenize", **documented(Detokenized))
async def detokenize(service: TheService, body: DetokenizeBody) -> Response:
    """Ids to text; bytes that are no UTF-8 become U+FFFD."""
    check_model(service, body.model)
    with blaming("tokens"):
        text = service.tokenizer.decode(body.tokens)
    return json_response({"prompt": text})


def check_model(service: Service, name: str | None) -> None:
    """Refuse a request that names another model."""
    if name is not None and name != service.facts.name:
        raise ModelNotFound(f"no model {name[:80]!r}; this server has {service.facts.name!r}")
