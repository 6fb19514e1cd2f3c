"""The lease of the leader as an object of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Protocol

from paceline_controller.cluster.leader import LeaseRecord
from paceline_controller.runtimes.kubernetes.resources import LEASES, Kind, Object


class LeaseApi(Protocol):
    """The part of the Kubernetes API that leases use."""

    async def get(self, kind: Kind, name: str) -> Object:
        """One object."""
        ...

    async def create(self, kind: Kind, body: Object) -> Object:
        """A new object."""
        ...

    async def replace(self, kind: Kind, body: Object) -> Object:
        """A version of an object by another."""
        ...


class ClusterLeases:
    """`Leases` with one coordination.k8s.io Lease; its times are for people, nobody judges by them.

    `owner` is an entry of `ownerReferences`: what the lease goes with.
    """

    def __init__(
        self,
        api: LeaseApi,
        name: str,
        *,
        lease_s: float,
        owner: Object | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._name = name
        self._lease_s = lease_s
        self._owner = owner
        self._now = now
        self._body: Object = {}  # as last read, with what others have put into it

    async def read(self) -> LeaseRecord:
        """The lease; raises `NotFoundError` if there is none."""
        return self._record_of(await self._api.get(LEASES, self._name))

    async def make(self, record: LeaseRecord) -> LeaseRecord:
        """The first lease; raises `ConflictError` if there is one."""
        metadata: Object = {"name": self._name}
        if self._owner is not None:
            metadata["ownerReferences"] = [self._owner]
        body: Object = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": metadata,
            "spec": self._spec(record, {}),
        }
        return self._record_of(await self._api.create(LEASES, body))

    async def write(self, record: LeaseRecord) -> LeaseRecord:
        """Replace the version that `record` names; raises `ConflictError` if it has changed."""
        metadata = {**self._body["metadata"], "resourceVersion": record.version}
        spec = self._spec(record, self._body.get("spec") or {})
        body = {**self._body, "metadata": metadata, "spec": spec}
        return self._record_of(await self._api.replace(LEASES, body))

    def _record_of(self, body: Object) -> LeaseRecord:
        self._body = body
        spec = body.get("spec") or {}
        return LeaseRecord(
            holder=spec.get("holderIdentity") or "",
            version=body["metadata"]["resourceVersion"],
            transitions=spec.get("leaseTransitions") or 0,
        )

    def _spec(self, record: LeaseRecord, before: Object) -> Object:
        now = self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        same = record.holder == before.get("holderIdentity")
        return {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": max(round(self._lease_s), 1),
            "acquireTime": before.get("acquireTime", now) if same else now,
            "renewTime": now,
            "leaseTransitions": record.transitions,
        }
