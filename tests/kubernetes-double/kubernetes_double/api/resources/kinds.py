"""All served kinds with their schemas, including custom resource definitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kubernetes_double.api.requests.errors import no_such_path
from kubernetes_double.api.resources.custom import resources_of, schema_of
from kubernetes_double.api.resources.registry import Catalog, Resource
from kubernetes_double.api.resources.schemas import Definitions, Schema

Object = dict[str, Any]
DEFINITIONS = "customresourcedefinitions.apiextensions.k8s.io"


@dataclass
class Kinds:
    """The catalog of resources and their schemas, built when first needed."""

    catalog: Catalog = field(default_factory=Catalog)
    definitions: Definitions = field(default_factory=Definitions)
    _schemas: dict[str, Schema] = field(default_factory=dict[str, Schema])

    def resource(self, group: str, version: str, plural: str) -> Resource:
        """The resource at a path. Raises a 404 if none is served there."""
        found = self.catalog.find(group, version, plural)
        if found is None:
            raise no_such_path()
        return found

    def schema(self, resource: Resource) -> Schema:
        """The schema of a resource in its version."""
        key = f"{resource.api_version}/{resource.kind}"
        if key not in self._schemas:
            place = (resource.group, resource.version, resource.kind)
            root = self.definitions.kind(*place)
            checker = self.definitions.validator(*place)
            self._schemas[key] = Schema(root, self.definitions, validator=checker)
        return self._schemas[key]

    def define(self, definition: Object) -> None:
        """Serve a CustomResourceDefinition, replacing its previous version."""
        served = resources_of(definition)
        spec = definition["spec"]
        self.catalog.replace_custom(spec["group"], spec["names"]["plural"], served)
        for resource in served:
            key = f"{resource.api_version}/{resource.kind}"
            self._schemas[key] = schema_of(definition, resource.version, self.definitions)

    def forget(self, definition: Object) -> None:
        """Stop serving a definition."""
        spec = definition["spec"]
        self.catalog.replace_custom(spec["group"], spec["names"]["plural"], [])
