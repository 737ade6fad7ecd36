"""The ASGI application: routes, error handlers, middleware, lifespan. The event loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from embedding.errors import EmbeddingError
from engine.errors import EngineError
from model.errors import ModelError
from server.budget import Budget
from server.desk import check_request
from server.errors import ServerError
from server.host import Host
from server.middleware import BodyLimit, RequestContext
from server.problems import Problem, http_problem, problem, validation_problem
from server.routes import (
    activations,
    capture,
    embed,
    health,
    models,
    sessions,
    steps,
    studies,
    sweep,
    tokens,
    vectors,
)
from server.settings import Settings
from sessions.errors import SessionError

BODIES_AT_ONCE = 4
"""Request bodies of the largest size that are held; more of a smaller one."""

ROUTERS = (
    health,
    models,
    tokens,
    embed,
    sessions,
    steps,
    vectors,
    activations,
    studies,
    sweep,
    capture,
)
METHOD_NOT_ALLOWED = 405
_KNOWN = (ServerError, EmbeddingError, EngineError, SessionError, ModelError)


def create_app(settings: Settings, host: Host) -> FastAPI:
    """The application. Its lifespan starts and closes `host`."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        host.start()
        yield
        await host.close()

    app = FastAPI(
        title="Stepscope",
        summary="GPT-2 incremental decoding that one can see inside.",
        lifespan=lifespan,
        dependencies=[Depends(check_request)],
        docs_url=None,  # its page would be fetched from somebody else's server
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.host = host
    for module in ROUTERS:
        app.include_router(module.router)
    _handle_errors(app)
    bodies = Budget(BODIES_AT_ONCE * settings.max_body_bytes)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes, budget=bodies)
    app.add_middleware(
        RequestContext, observer=host.metrics, write_timeout=settings.write_timeout
    )  # outermost: added last
    return app


def _handle_errors(app: FastAPI) -> None:
    for root in _KNOWN:
        app.add_exception_handler(root, _known)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)


def _response(told: Problem, extra: dict[str, str] | None = None) -> Response:
    return Response(
        told.body,
        status_code=told.status,
        media_type="application/json",
        headers=told.headers | (extra or {}),
    )


async def _known(_request: Request, error: Exception) -> Response:
    return _response(problem(error))


async def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _response(validation_problem(error.errors()))


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == METHOD_NOT_ALLOWED:
        headers["allow"] = ", ".join(_allowed(request))
    return _response(http_problem(error.status_code, str(error.detail)), headers)


def _allowed(request: Request) -> list[str]:
    """The methods of every route at this path: the router names those of the first one only."""
    routes = [route for module in ROUTERS for route in module.router.routes]
    there = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in there for method in getattr(route, "methods", ())})
