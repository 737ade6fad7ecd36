"""`/v1/vectors`: directions and other numbers that interventions name. The event loop."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from server.answers import VectorDeleted, VectorList, VectorState, documented
from server.desk import Route, TheService, json_response, takes
from server.interventions.vectors import Vector, parse_file

router = APIRouter(prefix="/v1/vectors", tags=["vectors"], route_class=Route)

FILES = ("application/octet-stream", "application/x-safetensors")


@router.put("", **documented(VectorList), **takes(*FILES))
async def put_vectors(service: TheService, request: Request) -> Response:
    """Keep the tensors of a safetensors file, each under an id that its numbers give it."""
    vectors = await asyncio.to_thread(parse_file, await request.body())
    service.vectors.put(vectors)
    return _listed(vectors)


@router.get("", **documented(VectorList))
async def list_vectors(service: TheService) -> Response:
    """Every vector that is kept."""
    return _listed(service.vectors.all())


@router.get("/{vector_id}", **documented(VectorState))
async def get_vector(service: TheService, vector_id: str) -> Response:
    """What is kept under this id."""
    return json_response(_told(vector_id, service.vectors.get(vector_id)))


@router.delete("/{vector_id}", **documented(VectorDeleted))
async def delete_vector(service: TheService, vector_id: str) -> Response:
    """Forget a vector. Edits that were made with it stay as they are."""
    service.vectors.delete(vector_id)
    return json_response({"id": vector_id, "object": "vector.deleted", "deleted": True})


def _listed(vectors: dict[str, Vector]) -> Response:
    data = [_told(vector_id, vector) for vector_id, vector in vectors.items()]
    return json_response({"object": "list", "data": data})


def _told(vector_id: str, vector: Vector) -> dict[str, Any]:
    return {
        "id": vector_id,
        "object": "vector",
        "name": vector.name,
        "dtype": "float32",
        "shape": list(vector.value.shape),
        "bytes": len(vector.value.data),
    }
