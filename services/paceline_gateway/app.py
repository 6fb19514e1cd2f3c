"""The REST application: routes, errors as JSON, OpenAPI under /docs."""

from __future__ import annotations

from typing import Any, cast

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from paceline import __version__
from paceline.config import JobSpec
from paceline.errors import InvalidError, NotFoundError, PacelineError
from paceline.logs import Log
from paceline_gateway.auth import Auth
from paceline_gateway.jobs import Desk
from paceline_gateway.routes import health, jobs

log = Log("rest")


class Api(FastAPI):
    """FastAPI whose OpenAPI document also describes the job file."""

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            job = JobSpec.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= job.pop("$defs") | {"JobSpec": job}
        return super().openapi()


def create_app(*, desk: Desk, auth: Auth) -> FastAPI:
    """The application around one desk."""
    app = Api(title="Paceline", version=__version__, description="Jobs over REST.")
    app.state.desk = desk
    app.include_router(jobs.router, dependencies=[Depends(auth)])
    app.include_router(health.router)
    app.add_exception_handler(PacelineError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_bad_request)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unexpected)
    return app


def _answer(kind: type[Exception], message: str, status: int) -> JSONResponse:
    body = {"error": {"type": kind.__name__, "message": message}}
    return JSONResponse(body, status_code=status)


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    known = cast(PacelineError, error)
    return _answer(type(known), known.message, known.http)


async def _on_bad_request(request: Request, error: Exception) -> JSONResponse:
    items = cast(RequestValidationError, error).errors()
    texts = [f"{item['loc'][-1]}: {item['msg']} (got {item['input']!r})" for item in items]
    return _answer(InvalidError, "; ".join(texts), InvalidError.http)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    known = cast(HTTPException, error)
    kind = NotFoundError if known.status_code == 404 else InvalidError
    message = f"{request.method} {request.url.path}: {known.detail}"
    return _answer(kind, message, known.status_code)


async def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("request failed", method=request.method, path=request.url.path, error=error)
    return _answer(PacelineError, "internal error; see the log of the gateway", 500)
