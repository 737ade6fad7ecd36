"""`/tokenize` and `/detokenize`, as vLLM has them. The event loop; long ones on a worker.

https://docs.vllm.ai/en/stable/serving/openai_compatible_server/#tokenizer-api
"""

from typing import Any

from fastapi import APIRouter, Response

from server.answers import Detokenized, Tokenized, documented
from server.desk import Route, TheService, stateless_json
from server.errors import ModelNotFound, blaming
from server.host import Service
from server.schemas import DetokenizeBody, TokenizeBody

router = APIRouter(tags=["tokens"], route_class=Route)

_BYTES_PER_CHARACTER = 64  # each may be a token: an int, a piece, their JSON
_BYTES_PER_TOKEN = 128  # of text; the longest is 128 spaces


@router.post("/tokenize", **documented(Tokenized))
async def tokenize(service: TheService, body: TokenizeBody) -> Response:
    """Text to ids. Nothing is added: GPT-2 has no token that begins a text."""
    check_model(service, body.model)
    tokenizer = service.engine.tokenizer

    def work() -> dict[str, Any]:
        with blaming("prompt"):
            token_ids = tokenizer.encode(body.prompt, allow_special=body.allow_special)
        pieces = [tokenizer.piece(i) for i in token_ids] if body.return_token_strs else None
        return {
            "count": len(token_ids),
            "max_model_len": service.facts.config.n_ctx,
            "tokens": token_ids,
            "token_strs": pieces,
        }

    held_bytes = min(len(body.prompt), tokenizer.max_text_bytes) * _BYTES_PER_CHARACTER
    return stateless_json(service, work, held_bytes=held_bytes, param="prompt")


@router.post("/detokenize", **documented(Detokenized))
async def detokenize(service: TheService, body: DetokenizeBody) -> Response:
    """Ids to text; bytes that are no UTF-8 become U+FFFD."""
    check_model(service, body.model)
    tokenizer = service.engine.tokenizer
    with blaming("tokens"):
        tokenizer.check_ids(body.tokens)
    return stateless_json(
        service,
        lambda: {"prompt": tokenizer.decode(body.tokens)},
        held_bytes=len(body.tokens) * _BYTES_PER_TOKEN,
        param="tokens",
    )


def check_model(service: Service, name: str | None) -> None:
    """Refuse a request that names another model."""
    if name is not None and name != service.facts.name:
        raise ModelNotFound(f"no model {name[:80]!r}; this server has {service.facts.name!r}")
