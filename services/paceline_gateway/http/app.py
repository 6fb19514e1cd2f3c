"""The REST application: routes, errors as JSON, OpenAPI under /docs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from paceline import __version__
from paceline.config import JobSpec
from paceline.errors import InvalidError, NotFoundError, PacelineError
from paceline.errors.wording import refusal, shown
from paceline.front.api.documents import ErrorView
from paceline.platform.telemetry.logs import Log
from paceline.platform.transport.operations import Operation
from paceline_gateway.access.authentication import Authenticator
from paceline_gateway.access.guard import RestGuard
from paceline_gateway.error_responses import error_response, response_of
from paceline_gateway.http.bodies import RequestBodies
from paceline_gateway.http.routes import code, docs, health
from paceline_gateway.http.routes import jobs as job_routes
from paceline_gateway.http.routes.operations import router_of
from paceline_gateway.job_api import SUBMIT, UPLOAD, WATCH, JobApi
from paceline_gateway.operations import Handler
from paceline_gateway.readiness import Readiness

log = Log("rest")


class RestApi(FastAPI):
    """FastAPI with schemas of the job file and of errors in its OpenAPI document."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document, built once."""
        if self.openapi_schema is None:
            schemas = super().openapi()["components"]["schemas"]
            for model in (JobSpec, ErrorView):
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas |= schema.pop("$defs") | {model.__name__: schema}
            document = self.openapi_schema or {}
            bearer = {"type": "http", "scheme": "bearer", "description": "A token of the API."}
            document["components"]["securitySchemes"] = {"token": bearer}
            document["security"] = [{"token": []}]
        return super().openapi()


def create_app(
    *,
    jobs: JobApi,
    handlers: Mapping[Operation, Handler],
    authenticator: Authenticator,
    readiness: Readiness,
) -> FastAPI:
    """The application: a route for every operation with one, behind authentication."""
    app = RestApi(
        title="Paceline",
        version=__version__,
        description="Jobs over REST.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.jobs = jobs
    app.state.readiness = readiness
    own = (SUBMIT, UPLOAD, WATCH)
    plain = {operation: handler for operation, handler in handlers.items() if operation not in own}
    app.include_router(job_routes.router)
    app.include_router(code.router_of(handlers[UPLOAD]))
    app.include_router(router_of(plain))
    app.include_router(health.router)
    app.include_router(docs.router)
    app.add_middleware(RequestBodies)
    app.add_middleware(RestGuard, authenticator=authenticator)
    app.add_exception_handler(PacelineError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_bad_request)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_unexpected)
    return app


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    return response_of(cast(PacelineError, error))


async def _on_bad_request(request: Request, error: Exception) -> JSONResponse:
    items = cast(RequestValidationError, error).errors()
    texts = [f"{item['loc'][-1]}: {refusal(item)} (got {shown(item['input'])})" for item in items]
    return response_of(InvalidError("; ".join(texts)))


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    known = cast(HTTPException, error)
    kind = NotFoundError if known.status_code == 404 else InvalidError
    message = f"{request.method} {request.url.path}: {known.detail}"
    return error_response(kind, message, known.status_code)


async def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("request failed", method=request.method, path=request.url.path, error=error)
    return error_response(PacelineError, "internal error; see the log of the gateway", 500)
