"""HTTP handling: authenticate, authorize, read the body, call the verb, write the response."""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from aiohttp import web

from kubernetes_double.api.policy.access import (
    Access,
    Authorizer,
    Identity,
    Tokens,
    Visit,
    service_account,
)
from kubernetes_double.api.policy.deletion import DeleteOptions, delete, delete_options
from kubernetes_double.api.requests import errors, protobuf, subresources
from kubernetes_double.api.requests.logs import PodLogs
from kubernetes_double.api.requests.patching import change_of
from kubernetes_double.api.resources import discovery
from kubernetes_double.api.resources.registry import Resource
from kubernetes_double.api.resources.tables import as_table
from kubernetes_double.api.storage.listing import Query, list_objects
from kubernetes_double.api.storage.objects import Objects, Place, WriteOptions
from kubernetes_double.api.storage.paths import Target, parse, verb_of
from kubernetes_double.api.storage.streams import Watches

Object = dict[str, Any]
Answer = tuple[int, Object]
logger = logging.getLogger(__name__)
FORCED = ("true", "1", "t")
MAX_BODY = 3 * 1024 * 1024


@dataclass
class Call:
    """A parsed request."""

    request: web.Request
    identity: Identity
    target: Target
    resource: Resource
    verb: str
    query: dict[str, str]
    body: Any = None
    warnings: list[str] = field(default_factory=list[str])

    @property
    def place(self) -> Place:
        """The target object."""
        return self.target.place(self.resource)

    @property
    def options(self) -> WriteOptions:
        """The options of a write."""
        agent = self.request.headers.get("User-Agent", "unknown").partition("/")[0]
        return WriteOptions(
            manager=self.query.get("fieldManager") or agent,
            named="fieldManager" in self.query,
            field_validation=self.query.get("fieldValidation") or "Warn",
            dry_run=bool(self.query.get("dryRun")),
            force=self.query.get("force", "").lower() in FORCED,
            warnings=self.warnings,
        )


@dataclass
class Api:
    """Serves the Kubernetes API over aiohttp."""

    objects: Objects
    tokens: Tokens
    authorizer: Authorizer
    watches: Watches
    logs: PodLogs
    visits: deque[Visit]
    decoder: protobuf.Decoder = field(default_factory=protobuf.Decoder)

    def application(self) -> web.Application:
        """The application, with a single handler since routes change with the kinds."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{tail:.*}", self.handle)
        return app

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request; errors become Status bodies."""
        try:
            identity = self._identify(request)
            target = parse(request.path)
            if target is None:
                return self._plain(request, identity)
            return await self._resource(request, identity, target)
        except errors.StatusError as error:
            return _json(error.code, error.body)
        except Exception:
            logger.exception("request failed", extra={"path": request.path})
            return _json(500, errors.internal("the server broke on this request").body)

    def _identify(self, request: web.Request) -> Identity:
        """The caller, or the user it impersonates. Raises 401 or 403."""
        caller = self.tokens.identify(request.headers.get("Authorization", ""))
        other = request.headers.get("Impersonate-User")
        if not other:
            return caller
        self._authorize(caller, Access("impersonate", resource="users", name=other))
        parts = other.split(":")
        if len(parts) == 4 and parts[:2] == ["system", "serviceaccount"]:
            return service_account(parts[2], parts[3])
        groups = request.headers.getall("Impersonate-Group", [])
        return Identity(other, (*groups, "system:authenticated"))

    def _plain(self, request: web.Request, identity: Identity) -> web.StreamResponse:
        access = Access(request.method.lower(), path=request.path)
        self._authorize(identity, access)
        if request.path in ("/healthz", "/livez", "/readyz"):
            return web.Response(text="ok")
        base = f"{request.url.origin()}"
        body = discovery.answer(self.objects.kinds, request.path, base)
        return _json(200, body)

    def _authorize(self, identity: Identity, access: Access) -> None:
        allowed = self.authorizer.allows(identity, access)
        self.visits.append(Visit(identity.name, access, allowed))
        self.authorizer.check(identity, access)

    async def _resource(
        self, request: web.Request, identity: Identity, target: Target
    ) -> web.StreamResponse:
        query = dict(request.query)
        verb = verb_of(request.method, target, query)
        self._authorize(identity, target.access(verb))
        resource = target.resource(self.objects.kinds)
        call = Call(request, identity, target, resource, verb, query)
        if verb == "watch":
            return await self.watches.serve(request, self._query(call))
        if target.subresource == "log":
            return await self.logs.serve(request, self.objects.stored(call.place))
        call.body = await _read(request, self.decoder)
        code, answer = self._dispatch(call)
        return _json(code, self._shape(call, answer), warnings=call.warnings)

    def _shape(self, call: Call, answer: Object) -> Object:
        """Convert the response to a table if the client asks for one."""
        if "as=Table" not in call.request.headers.get("Accept", "") or call.verb not in (
            "get",
            "list",
        ):
            return answer
        return as_table(call.resource, self.objects.kinds.schema(call.resource), answer)

    def _query(self, call: Call) -> Query:
        fields = call.query.get("fieldSelector", "")
        if call.target.name:
            fields = ",".join(filter(None, (fields, f"metadata.name={call.target.name}")))
        place = call.place
        schema = self.objects.kinds.schema(call.resource)
        return Query(
            call.resource,
            place.namespace if place.resource.storage != "namespaces" else "",
            call.query.get("labelSelector", ""),
            fields,
            schema.selectable,
        )

    def _dispatch(self, call: Call) -> Answer:
        if call.target.subresource not in ("", "status"):
            return self._door(call)
        if call.target.subresource == "status" and not call.resource.has_status:
            raise errors.no_such_path()
        if call.verb not in call.resource.verbs:
            raise errors.not_allowed(call.verb)
        verbs: dict[str, Callable[[Call], Answer]] = {
            "get": lambda c: (200, self.objects.get(c.place)),
            "list": self._list,
            "create": self._create,
            "update": lambda c: (200, self.objects.update(c.place, _object(c.body), c.options)),
            "patch": self._patch,
            "delete": self._delete,
            "deletecollection": self._delete_many,
        }
        return verbs[call.verb](call)

    def _list(self, call: Call) -> Answer:
        query = call.query
        return 200, list_objects(
            self.objects.store,
            self._query(call),
            limit=errors.whole("limit", query.get("limit") or 0),
            token=query.get("continue", ""),
            revision=query.get("resourceVersion", ""),
            match=query.get("resourceVersionMatch", ""),
        )

    def _create(self, call: Call) -> Answer:
        body = _object(call.body)
        if call.resource.group == "authorization.k8s.io":
            reviews = subresources.Reviews(self.authorizer)
            return 201, reviews.answer(call.resource.kind, call.identity, body)
        place = call.place
        return 201, self.objects.create(call.resource, place.namespace, body, call.options)

    def _patch(self, call: Call) -> Answer:
        return change_of(
            self.objects, call.place, call.request.content_type, call.body, call.options
        )

    def _delete(self, call: Call) -> Answer:
        options = delete_options(_object(call.body or {}), call.query)
        return 200, delete(self.objects, call.place, options)

    def _delete_many(self, call: Call) -> Answer:
        options = delete_options(_object(call.body or {}), call.query)
        options = DeleteOptions(options.grace_s, options.propagation, dry_run=options.dry_run)
        found = list_objects(self.objects.store, self._query(call))
        for one in found["items"]:
            metadata = one["metadata"]
            place = replace(
                call.place, namespace=metadata.get("namespace", ""), name=metadata["name"]
            )
            delete(self.objects, place, options)
        return 200, found

    def _door(self, call: Call) -> Answer:
        door = call.target.subresource
        if door not in call.resource.subresources:
            raise errors.no_such_path()
        place, body = call.place, call.body
        match door, call.verb:
            case "scale", "get":
                return 200, subresources.scale_of(self.objects.get(place))
            case "scale", "update":
                return 200, subresources.rescale(
                    self.objects, place, lambda _: _object(body), call.options
                )
            case "scale", "patch":
                return self._patch(call)
            case "eviction", "create":
                return 201, subresources.evict(self.objects, place, _object(body))
            case "binding", "create":
                return 201, subresources.bind(self.objects, place, _object(body), call.options)
            case "token", "create":
                answer = subresources.request_token(self.objects, self.tokens, place, _object(body))
                return 201, answer
            case "finalize", "update":
                return 200, self.objects.modify(place, lambda _: _object(body), call.options)
            case _:
                raise errors.not_allowed(call.verb)


def _object(body: Any) -> Object:
    if not isinstance(body, dict):
        raise errors.bad_request("the body must be one object")
    return body


async def _read(request: web.Request, decoder: protobuf.Decoder) -> Any:
    raw = await request.read()
    if not raw:
        return None
    if request.content_type == protobuf.MEDIA:
        return decoder.decode(raw)
    if "cbor" in request.content_type:
        raise errors.unsupported(request.content_type)
    try:
        if "yaml" in request.content_type:
            return yaml.load(raw, yaml.CSafeLoader)
        return json.loads(raw)
    except (ValueError, yaml.YAMLError) as error:
        raise errors.bad_request(f"cannot read the body: {error}") from error


def _json(code: int, body: Object, warnings: list[str] | None = None) -> web.Response:
    response = web.json_response(body, status=code)
    for text in warnings or ():
        printable = "".join(one if one.isprintable() else "?" for one in text)
        escaped = printable.replace("\\", "\\\\").replace('"', '\\"')
        response.headers.add("Warning", f'299 - "{escaped}"')
    return response
