"""Write operations: create, update, patch, apply, delete."""

from __future__ import annotations

import contextlib
import copy
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from kubernetes_double.api.policy.admission import Admission
from kubernetes_double.api.policy.ownership import Manager, Managers, after_update, leaves
from kubernetes_double.api.policy.quotas import QUOTAS
from kubernetes_double.api.requests import errors
from kubernetes_double.api.requests.apply import apply
from kubernetes_double.api.resources.conversion import from_storage, to_storage
from kubernetes_double.api.resources.custom import (
    CLEANUP,
    check_definition,
    check_rules,
    established,
)
from kubernetes_double.api.resources.defaults import apply_defaults
from kubernetes_double.api.resources.kinds import DEFINITIONS, Kinds
from kubernetes_double.api.resources.registry import Resource
from kubernetes_double.api.resources.rules import check_change, check_names, check_selector
from kubernetes_double.api.resources.schemas import Problem, decode, fill, validate
from kubernetes_double.api.resources.typed import check_patch
from kubernetes_double.api.resources.workloads import check_workload
from kubernetes_double.api.storage.store import Store

Object = dict[str, Any]
Now = Callable[[], datetime]
ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
KEPT = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds", "generation")


@dataclass(frozen=True, slots=True)
class Place:
    """An object, and the subresource through which it is accessed."""

    resource: Resource
    namespace: str
    name: str
    subresource: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Its key in the store."""
        return self.namespace, self.name

    @property
    def named(self) -> tuple[str, str, str]:
        """Group, plural and name, for errors."""
        return self.resource.group, self.resource.plural, self.name


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options from the query of a write; `warnings` collects those for the response."""

    manager: str = "unknown"
    operation: str = "Update"
    field_validation: str = "Warn"
    named: bool = False
    """Whether the client itself named the manager."""
    dry_run: bool = False
    force: bool = False
    warnings: list[str] = field(default_factory=list[str])


def utc_now() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


def stamp(at: datetime) -> str:
    """A timestamp in the API's format, in seconds."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Objects:
    """Writes objects with the checks and bookkeeping of the real server."""

    store: Store
    kinds: Kinds
    admission: Admission
    now: Now = utc_now

    def get(self, place: Place) -> Object:
        """The stored object in the requested version. Raises a 404."""
        return from_storage(place.resource, self.stored(place))

    def stored(self, place: Place) -> Object:
        """The object as it is stored. Raises a 404."""
        found = self.store.get(place.resource.storage, place.key)
        if found is None:
            raise errors.not_found(*place.named)
        return found

    def create(
        self,
        resource: Resource,
        namespace: str,
        body: Object,
        options: WriteOptions,
        managers: Managers | None = None,
    ) -> Object:
        """Raises 400, 404 (no namespace), 409 (exists), 422 (invalid), 403 (not admitted)."""
        new = self._read(resource, body, options)
        place = Place(resource, namespace, self._name(resource, new["metadata"]))
        self._meet(place, new)
        if new["metadata"].get("resourceVersion"):
            raise errors.bad_request("resourceVersion should not be set on objects to be created")
        self._birth(place, new)
        new = self._complete(resource, new)
        self._check(resource, new, None)
        self.admission.on_create(resource, new)
        nobodys = {"status": new["status"]} if "status" in new else {}
        self._credit(place, nobodys, new, managers or Managers(), options)
        if self.store.get(resource.storage, place.key) is not None:
            raise errors.already_exists(*place.named)
        return from_storage(resource, self._write(place, new, options))

    def update(self, place: Place, body: Object, options: WriteOptions) -> Object:
        """Replace. Raises 400, 404, 409 (resourceVersion or uid differ), 422."""
        old = self.stored(place)
        new = self._read(place.resource, body, options)
        self._meet(place, new)
        strict = place.resource.custom or place.resource.plural == "leases"
        if strict and not new["metadata"].get("resourceVersion"):
            text = "Invalid value: 0: must be specified for an update"
            causes = [errors.cause("FieldValueInvalid", text, "metadata.resourceVersion")]
            raise self._invalid(place, causes)
        return self._replace(place, old, new, options)

    def modify(
        self, place: Place, change: Callable[[Object], Object], options: WriteOptions
    ) -> Object:
        """Replace an object by the result of `change`, for patches and subresources."""
        old = self.stored(place)
        proposed = change(copy.deepcopy(from_storage(place.resource, old)))
        new = self._read(place.resource, proposed, options)
        self._meet(place, new)
        return self._replace(place, old, new, options)

    def settle(self, place: Place, new: Object) -> Object:
        """Write a change by the server itself; removes an object without remaining finalizers."""
        return self._write(place, new, WriteOptions())

    def found(self, resource: Resource, namespace: str, content: Object) -> Object:
        """Create an object on behalf of the server."""
        return self.create(resource, namespace, content, WriteOptions(manager="kube-apiserver"))

    def remove(self, place: Place) -> Object:
        """Remove an object from the store immediately."""
        return from_storage(place.resource, self._erase(place))

    def _read(self, resource: Resource, body: Object, options: WriteOptions) -> Object:
        if not isinstance(body.get("metadata") or {}, dict):
            raise errors.bad_request("metadata must be an object")
        for name, wanted in (("apiVersion", resource.api_version), ("kind", resource.kind)):
            if body.get(name, wanted) != wanted:
                message = f"{name} in the data ({body[name]}) does not match the expected {wanted}"
                raise errors.bad_request(message)
        body = {**body, "apiVersion": resource.api_version, "kind": resource.kind}
        body["metadata"] = body.get("metadata") or {}
        decoded = decode(self.kinds.schema(resource), body)
        self._unknown(resource, decoded.unknown, options)
        return to_storage(resource, decoded.value)

    def _unknown(self, resource: Resource, paths: list[str], options: WriteOptions) -> None:
        texts = [f'unknown field "{path}"' for path in paths]
        if texts and options.field_validation == "Strict":
            message = f"{resource.kind} in version {resource.version!r} cannot be handled as a "
            message += f"{resource.kind}: strict decoding error: {', '.join(texts)}"
            raise errors.bad_request(message)
        if options.field_validation == "Warn":
            options.warnings.extend(texts)

    def _name(self, resource: Resource, metadata: Object) -> str:
        if not metadata.get("name") and metadata.get("generateName"):
            tail = "".join(secrets.choice(ALPHABET) for _ in range(5))
            metadata["name"] = f"{metadata['generateName'][:58]}{tail}"
        if not metadata.get("name"):
            text = "Required value: name or generateName is required"
            causes = [errors.cause("FieldValueRequired", text, "metadata.name")]
            raise errors.invalid(resource.group, resource.kind, "", causes)
        return metadata["name"]

    def _meet(self, place: Place, new: Object) -> None:
        """Check that the body names the same object as the path."""
        metadata = new["metadata"]
        if metadata.setdefault("name", place.name) != place.name:
            raise errors.bad_request(
                f"the name of the object ({metadata['name']}) does not match "
                f"the name on the URL ({place.name})"
            )
        if not place.resource.namespaced:
            metadata.pop("namespace", None)
        elif metadata.setdefault("namespace", place.namespace) != place.namespace:
            raise errors.bad_request(
                "the namespace of the provided object does not match "
                "the namespace sent on the request"
            )

    def _birth(self, place: Place, new: Object) -> None:
        metadata = new["metadata"]
        for name in (*KEPT, "resourceVersion", "selfLink", "managedFields"):
            metadata.pop(name, None)
        metadata["uid"] = str(uuid.uuid4())
        metadata["creationTimestamp"] = stamp(self.now())
        if place.resource.generation:
            metadata["generation"] = 1
        if place.resource.has_status:
            new.pop("status", None)
        if place.resource.storage == "pods":
            new["status"] = {"phase": "Pending"}
        if place.resource.storage == QUOTAS:
            new["status"] = {"hard": new.get("spec", {}).get("hard", {})}
        if place.resource.storage == DEFINITIONS:
            metadata["finalizers"] = [*metadata.get("finalizers", ()), CLEANUP]
            new["status"] = established(new, stamp(self.now()))

    def _complete(self, resource: Resource, new: Object) -> Object:
        new = fill(self.kinds.schema(resource), new)
        # Missing parts and wrong types are reported by validation.
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            apply_defaults(resource.storage, new)
        return new

    def _check(self, resource: Resource, new: Object, old: Object | None) -> None:
        schema = self.kinds.schema(resource)
        problems = validate(schema, from_storage(resource, new))
        wrong = [problem for problem in problems if problem.wire]
        if wrong:
            raise errors.bad_request(
                f"{resource.kind} in version {resource.version!r} cannot be handled as a "
                f"{resource.kind}: {wrong[0].field}: {wrong[0].message}"
            )
        place = Place(resource, "", new["metadata"]["name"])
        causes = [_cause(problem) for problem in problems]
        causes += check_names(resource, new)
        if not causes:
            causes += check_selector(resource, new)
            causes += check_workload(resource, new)
            causes += check_change(resource, old, new) if old else []
            causes += check_rules(schema, new, old)
            causes += check_definition(new, old) if resource.storage == DEFINITIONS else []
        if causes:
            raise self._invalid(place, causes)

    def _invalid(self, place: Place, causes: list[Object]) -> errors.StatusError:
        return errors.invalid(place.resource.group, place.resource.kind, place.name, causes)

    def _replace(
        self,
        place: Place,
        old: Object,
        new: Object,
        options: WriteOptions,
        managers: Managers | None = None,
    ) -> Object:
        self._preconditions(place, old, new["metadata"])
        new = self._carry(place, old, new)
        new = self._complete(place.resource, new)
        if place.resource.generation and _spec(old) != _spec(new):
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        self._check(place.resource, new, old)
        new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        self._credit(place, old, new, managers or Managers.of(new), options)
        if new == old:
            return from_storage(place.resource, old)
        return from_storage(place.resource, self._write(place, new, options))

    def _credit(
        self, place: Place, old: Object, new: Object, managers: Managers, options: WriteOptions
    ) -> None:
        """Record field ownership; apply has already done so."""
        if options.operation == "Update":
            schema = self.kinds.schema(place.resource)
            manager = self._manager(place, options)
            managers = after_update(schema, managers, manager, old, new)
        new["metadata"]["managedFields"] = managers.listed()

    def _manager(self, place: Place, options: WriteOptions) -> Manager:
        return Manager(
            options.manager,
            options.operation,
            place.resource.api_version,
            place.subresource,
            time=stamp(self.now()),
        )

    def apply(self, place: Place, body: Object, options: WriteOptions) -> tuple[int, Object]:
        """Server-side apply; 201 and the object when it is new, else 200 and the object.

        Raises 400, 404 (at a door of no object), 409 (conflicts), 422, 500 (not of the schema).
        """
        # The schema rejects unknown fields below, whatever validation the client asks for.
        options = replace(options, operation="Apply", field_validation="Ignore")
        wanted = self._read(place.resource, body, options)
        check_patch(self.kinds.schema(place.resource), place.resource, body)
        self._meet(place, wanted)
        _narrow(place, wanted)
        schema, manager = self.kinds.schema(place.resource), self._manager(place, options)
        old = self.store.get(place.resource.storage, place.key)
        if old is None:
            return 201, self._apply_new(place, wanted, manager, options)
        expected = wanted["metadata"].pop("resourceVersion", None)
        uid = wanted["metadata"].pop("uid", None)
        self._preconditions(place, old, {"resourceVersion": expected, "uid": uid})
        done = apply(schema, old, wanted, manager, managers=Managers.of(old), force=options.force)
        return 200, self._replace(place, old, copy.deepcopy(done.value), options, done.managers)

    def _apply_new(
        self, place: Place, wanted: Object, manager: Manager, options: WriteOptions
    ) -> Object:
        if place.subresource:
            raise errors.not_found(*place.named)
        schema = self.kinds.schema(place.resource)
        paths = frozenset(leaves(schema, wanted))
        managers = Managers().give(manager, paths, frozenset())
        return self.create(place.resource, place.namespace, wanted, options, managers)

    def _preconditions(self, place: Place, old: Object, metadata: Object) -> None:
        version, uid = metadata.get("resourceVersion"), metadata.get("uid")
        if version and version != old["metadata"]["resourceVersion"]:
            raise errors.conflict(*place.named)
        if uid and uid != old["metadata"]["uid"]:
            why = (
                f"Precondition failed: UID in precondition: {uid}, "
                f"UID in object meta: {old['metadata']['uid']}"
            )
            raise errors.conflict(*place.named, why=why)

    def _carry(self, place: Place, old: Object, new: Object) -> Object:
        """Restore everything that this subresource must not change."""
        if place.subresource == "status":
            status = {"status": new["status"]} if "status" in new else {}
            rest = {name: value for name, value in old.items() if name != "status"}
            return copy.deepcopy({**rest, **status})
        metadata = new["metadata"]
        given = metadata.get("managedFields")
        for name in (*KEPT, "managedFields", "generateName"):
            metadata.pop(name, None)
            if name in old["metadata"]:
                metadata[name] = copy.deepcopy(old["metadata"][name])
        if given:
            metadata["managedFields"] = given
        if place.resource.has_status:
            new.pop("status", None)
            if "status" in old:
                new["status"] = copy.deepcopy(old["status"])
        return new

    def _write(self, place: Place, new: Object, options: WriteOptions) -> Object:
        if options.dry_run:
            return new
        metadata = new["metadata"]
        done = not metadata.get("finalizers") and not metadata.get("deletionGracePeriodSeconds")
        if place.resource.storage == "namespaces":
            done = done and not new.get("spec", {}).get("finalizers")
        if metadata.get("deletionTimestamp") and done:
            return self._erase(place, new)
        stored = self.store.put(place.resource.storage, place.key, new)
        if place.resource.storage == DEFINITIONS:
            self.kinds.define(stored)
        return stored

    def _erase(self, place: Place, last: Object | None = None) -> Object:
        gone = self.store.remove(place.resource.storage, place.key, last)
        if place.resource.storage == DEFINITIONS:
            self.kinds.forget(gone)
        return gone


def _narrow(place: Place, wanted: Object) -> None:
    """Remove the fields outside the subresource from an applied object."""
    if place.subresource == "status":
        for name in [n for n in wanted if n not in ("apiVersion", "kind", "metadata", "status")]:
            del wanted[name]
        kept = ("name", "namespace", "resourceVersion", "uid")
        wanted["metadata"] = {k: v for k, v in wanted["metadata"].items() if k in kept}
    elif place.resource.has_status:
        wanted.pop("status", None)
    wanted["metadata"].pop("managedFields", None)


def _spec(obj: Object) -> Object:
    return {name: value for name, value in obj.items() if name not in ("metadata", "status")}


def _cause(problem: Problem) -> Object:
    return errors.cause(problem.reason, problem.message, problem.field)


def later(at: datetime, seconds: float) -> str:
    """A later timestamp in the API's format."""
    return stamp(at + timedelta(seconds=seconds))
