"""Applies PATCH requests by media type."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from kubernetes_double.api.requests import patches, subresources
from kubernetes_double.api.requests.errors import bad_request, cause, invalid, unsupported
from kubernetes_double.api.storage.objects import Objects, Place, WriteOptions

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
JSON = "application/json-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = ("application/apply-patch+yaml", "application/apply-patch+json")


def change_of(
    objects: Objects, place: Place, media: str, body: Any, options: WriteOptions
) -> tuple[int, Object]:
    """Patch the object or its scale. Raises 400, 404, 409, 415, 422."""
    if media in APPLY:
        return _apply(objects, place, body, options)
    change = _change(objects, place, media, body)
    if place.subresource == "scale":
        return 200, subresources.rescale(objects, place, change, options)
    return 200, objects.modify(place, change, options)


def _apply(objects: Objects, place: Place, body: Any, options: WriteOptions) -> tuple[int, Object]:
    if not options.named:
        causes = [
            cause(
                "FieldValueRequired", "Required value: is required for apply patch", "fieldManager"
            )
        ]
        raise invalid("meta.k8s.io", "PatchOptions", "", causes)
    if not isinstance(body, dict) or not body.get("apiVersion") or not body.get("kind"):
        raise bad_request("an apply patch must be an object with apiVersion and kind")
    return objects.apply(place, body, options)


def _change(objects: Objects, place: Place, media: str, body: Any) -> Callable[[Object], Object]:
    if media == JSON:
        return lambda obj: patches.json_patch(obj, body)
    if not isinstance(body, dict):
        raise bad_request("a patch of this type must be an object")
    if media == MERGE:
        return lambda obj: patches.merge(obj, body)
    if media == STRATEGIC and not place.resource.custom:
        schema = objects.kinds.schema(place.resource)
        if place.subresource == "scale":
            return lambda obj: patches.merge(obj, body)
        return lambda obj: copy.deepcopy(patches.strategic(schema, obj, body))
    raise unsupported(media)
