"""Schema of the issuer's configuration file."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import Field, model_validator

from paceline.plugins import StrictModel

DOMAIN = "paceline.internal"
"""A name in every certificate, so that clients can verify a peer whatever its address."""
DAY_S = 86_400.0

Days = Annotated[float, Field(ge=0.001, le=36_500)]
SecretName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
_LABEL = "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
DnsName = Annotated[str, Field(max_length=253, pattern=rf"^(\*\.)?{_LABEL}(\.{_LABEL})*$")]


class OwnerReference(StrictModel):
    """The owner of the Secrets: they are garbage-collected with it."""

    api_version: str
    kind: str
    name: str
    uid: str


class Leaf(StrictModel):
    """The certificate of one service."""

    secret: SecretName
    names: tuple[DnsName, ...] = ()
    """DNS names of its Service, besides `paceline.internal` and `<service>.paceline.internal`."""


class Issue(StrictModel):
    """One authority and the certificates that it signs."""

    namespace: str = Field(min_length=1)
    authority: SecretName
    """The Secret of the authority; the only one that holds its key."""
    days: Days = 90.0
    """Lifetime of a certificate; it is renewed after two thirds of that."""
    authority_days: Days = 3650.0
    spread_s: float | None = Field(default=None, ge=0)
    """How long every process has to pick up a new authority before it signs; null: a day, or a
    sixth of a certificate's lifetime if that is shorter."""
    services: dict[Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")], Leaf] = Field(min_length=1)
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the Secrets."""
    owner: OwnerReference | None = None
    kubeconfig: str = ""
    """Path; empty: the ServiceAccount of the pod."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of the whole run."""

    @property
    def spread(self) -> timedelta:
        """`spread_s`, or its default."""
        chosen = min(DAY_S, self._longest_spread_s) if self.spread_s is None else self.spread_s
        return timedelta(seconds=chosen)

    @property
    def _longest_spread_s(self) -> float:
        return self.days * DAY_S / 6

    def names(self, service: str) -> tuple[str, ...]:
        """All names of a service's certificate, its role first."""
        own = (f"{service}.{DOMAIN}", DOMAIN, *self.services[service].names)
        return tuple(dict.fromkeys(own))

    @model_validator(mode="after")
    def _secrets_differ(self) -> Issue:
        taken = {self.authority: "authority"}
        for service, leaf in self.services.items():
            if leaf.secret in taken:
                raise ValueError(
                    f"services.{service}.secret: {leaf.secret!r} is also that of "
                    f"{taken[leaf.secret]}; give each its own"
                )
            taken[leaf.secret] = service
        return self

    @model_validator(mode="after")
    def _lives_fit(self) -> Issue:
        if self.authority_days < 2 * self.days:
            raise ValueError(
                f"authority_days: {self.authority_days:g} with days {self.days:g}; at least twice "
                "as long, or certificates die with their authority"
            )
        if (self.spread_s or 0.0) > self._longest_spread_s:
            raise ValueError(
                f"spread_s: {self.spread_s:g} with days {self.days:g}; "
                f"at most {self._longest_spread_s:g}, a sixth of a certificate's life"
            )
        return self
