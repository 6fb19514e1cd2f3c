"""The REST application: routes, errors as JSON, OpenAPI under /docs."""

from __future__ import annotations

from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from paceline import __version__
from paceline.config import JobSpec
from paceline.config.load import shown
from paceline.errors import InvalidError, NotFoundError, PacelineError
from paceline.logs import Log
from paceline_gateway.administration import Administration
from paceline_gateway.auth import Door
from paceline_gateway.bodies import Bodies
from paceline_gateway.guard import RestGuard, answer, refusal
from paceline_gateway.jobs import Desk
from paceline_gateway.readiness import Readiness
from paceline_gateway.routes import access, docs, health, jobs, tenants
from paceline_gateway.rules import check_rest

log = Log("rest")


class Api(FastAPI):
    """FastAPI whose OpenAPI document also describes the job file."""

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            job = JobSpec.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= job.pop("$defs") | {"JobSpec": job}
            document = self.openapi_schema or {}
            bearer = {"type": "http", "scheme": "bearer", "description": "A token of the API."}
            document["components"]["securitySchemes"] = {"token": bearer}
            document["security"] = [{"token": []}]
        return super().openapi()


def create_app(
    *, desk: Desk, administration: Administration, door: Door, readiness: Readiness
) -> FastAPI:
    """The application around one desk, behind one door.

    Raises:
        ValueError: a route has no rule.
    """
    app = Api(
        title="Paceline",
        version=__version__,
        description="Jobs over REST.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.desk = desk
    app.state.readiness = readiness
    app.state.administration = administration
    app.include_router(jobs.router)
    app.include_router(access.router)
    app.include_router(tenants.router)
    app.include_router(health.router)
    app.include_router(docs.router)
    app.add_middleware(Bodies)
    app.add_middleware(RestGuard, door=door)
    app.add_exception_handler(PacelineError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_bad_request)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unexpected)
    check_rest(app)
    return app


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return refusal(cast(PacelineError, error))


async def _on_bad_request(request: Request, error: Exception) -> JSONResponse:
    items = cast(RequestValidationError, error).errors()
    texts = [f"{item['loc'][-1]}: {item['msg']} (got {shown(item['input'])})" for item in items]
    return refusal(InvalidError("; ".join(texts)))


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    known = cast(HTTPException, error)
    kind = NotFoundError if known.status_code == 404 else InvalidError
    message = f"{request.method} {request.url.path}: {known.detail}"
    return answer(kind, message, known.status_code)


async def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("request failed", method=request.method, path=request.url.path, error=error)
    return answer(PacelineError, "internal error; see the log of the gateway", 500)
