"""Reads Secrets through the Kubernetes API, and replaces them with optimistic locking."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from paceline.errors import (
    AuthenticationError,
    ConfigError,
    ConflictError,
    DeadlineError,
    InvalidError,
    PacelineError,
    PermissionDeniedError,
    StateError,
    UnavailableError,
)
from paceline.platform.proxies import environment_proxy
from paceline_controller.certificates.config import Issue

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "paceline-certificates"
CALL_TIMEOUT_S = 10.0

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class StoredSecret:
    """A Secret as it was read."""

    data: Mapping[str, bytes]
    version: str
    labels: Mapping[str, str]


class Secrets:
    """The Secrets of one namespace. Needs RBAC `create`, and `get` and `update` on the names."""

    def __init__(
        self, api: Any, issue: Issue, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._issue = issue
        self._clock = clock
        self._deadline = clock() + issue.timeout_s

    @classmethod
    def connect(cls, issue: Issue) -> Secrets:
        """Connect with `kubeconfig`, or as the ServiceAccount of the pod.

        Raises:
            ConfigError: the file, or the ServiceAccount, is missing or invalid.
        """
        settings: Any = client.Configuration()
        settings.proxy = ""  # a pod calls the API server of its cluster directly
        # `run` retries whole passes.
        settings.retries = False
        try:
            if issue.kubeconfig:
                config.load_kube_config(issue.kubeconfig, client_configuration=settings)
                settings.proxy = settings.proxy or environment_proxy(settings.host)
            else:
                config.load_incluster_config(client_configuration=settings)
        except ConfigException as error:
            raise ConfigError(
                f"kubeconfig: {issue.kubeconfig!r}: {error}; run in a pod with a ServiceAccount "
                "token, or name a kubeconfig file"
            ) from None
        return cls(client.CoreV1Api(client.ApiClient(settings)), issue)

    def left_s(self) -> float:
        """Seconds until the deadline of the run."""
        return self._deadline - self._clock()

    def read(self, name: str) -> StoredSecret | None:
        """A Secret; None if it does not exist.

        Raises:
            StateError: it exists, but the issuer did not create it.
        """
        try:
            secret = self._call("get", name, self._api.read_namespaced_secret, name)
        except _MissingError:
            return None
        labels = secret.metadata.labels or {}
        if labels.get(MANAGED_BY) != MANAGER:
            raise StateError(
                f"secret {self._issue.namespace}/{name} was not made by the issuer "
                f"(label {MANAGED_BY} is {labels.get(MANAGED_BY)!r}, not {MANAGER!r}); "
                "delete it or choose another name"
            )
        data = {key: b64decode(value) for key, value in (secret.data or {}).items()}
        return StoredSecret(data, secret.metadata.resource_version, labels)

    def write(self, name: str, data: Mapping[str, bytes], seen: StoredSecret | None) -> None:
        """Create a Secret, or replace the one that was read.

        Raises:
            ConflictError: it has changed since.
        """
        body = self._body(name, data, seen)
        if seen is None:
            self._call("create", name, self._api.create_namespaced_secret, body=body)
        else:
            self._call("update", name, self._api.replace_namespaced_secret, name, body=body)

    def labelled(self, seen: StoredSecret) -> bool:
        """Whether a Secret has the labels of the installation."""
        return all(seen.labels.get(key) == value for key, value in self._labels().items())

    def _labels(self) -> dict[str, str]:
        return {**self._issue.labels, MANAGED_BY: MANAGER}

    def _body(self, name: str, data: Mapping[str, bytes], seen: StoredSecret | None) -> Any:
        owner = self._issue.owner
        references = owner and [client.V1OwnerReference(**owner.model_dump())]
        return client.V1Secret(
            api_version="v1",
            kind="Secret",
            type="kubernetes.io/tls",
            metadata=client.V1ObjectMeta(
                name=name,
                namespace=self._issue.namespace,
                labels={**(seen.labels if seen else {}), **self._labels()},
                owner_references=references,
                resource_version=seen and seen.version,
            ),
            data={key: b64encode(value).decode() for key, value in data.items()},
        )

    def _call(
        self, verb: str, name: str, method: Callable[..., Answer], *args: Any, **kwargs: Any
    ) -> Answer:
        left = self.left_s()
        where = f"{verb} secret {self._issue.namespace}/{name}"
        if left <= 0:
            raise DeadlineError(f"{where}: no time is left of timeout_s {self._issue.timeout_s:g}")
        timeout = min(left, CALL_TIMEOUT_S)
        try:
            return method(
                *args, namespace=self._issue.namespace, _request_timeout=timeout, **kwargs
            )
        except ApiException as error:
            raise _translate(error, where) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise UnavailableError(f"{where}: the API server cannot be reached: {error}") from None


class _MissingError(PacelineError):
    """There is no such Secret."""


def _translate(error: ApiException, where: str) -> PacelineError:
    """The `PacelineError` for a refused request, without its body: that may echo a secret."""
    text = f"{where}: {error.status} {error.reason}"
    if error.status == 403:
        return PermissionDeniedError(f"{text}; the role of the ServiceAccount has to allow it")
    if error.status == 401:
        return AuthenticationError(f"{text}; the token is not accepted")
    if error.status == 404 and where.startswith("get"):
        return _MissingError(text)
    if error.status == 404 and where.startswith("create"):
        return InvalidError(f"{text}; is there such a namespace?")
    if error.status in {404, 409}:
        return ConflictError(text)
    if not error.status or error.status == 429 or error.status >= 500:
        return UnavailableError(text)
    return InvalidError(text)
