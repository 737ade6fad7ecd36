"""`/health`, `/ready`, `/metrics`, `/version`: for whoever runs the server. The event loop.

None of them waits for the model thread.
"""

from importlib.metadata import version

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from server.answers import Status, Version, documented
from server.desk import Route, TheHost, json_response

router = APIRouter(tags=["health"], route_class=Route)


@router.get("/health", **documented(Status))
async def health(host: TheHost) -> Response:
    """Whether the process should live on; 200 while it loads or is only slow."""
    host.check_alive()
    return json_response({"status": "ok"})


@router.get("/ready", **documented(Status))
async def ready(host: TheHost) -> Response:
    """Whether a request would be served now; 503 while loading, stalled or shutting down."""
    host.check_ready()
    return json_response({"status": "ready"})


@router.get("/metrics", response_class=Response)
async def metrics(host: TheHost) -> Response:
    """Prometheus's text format."""
    return Response(host.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/version", **documented(Version))
async def get_version() -> Response:
    """The version of the server."""
    return json_response({"version": version("stepscope")})
