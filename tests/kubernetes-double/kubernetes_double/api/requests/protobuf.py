"""Decodes bodies in the Kubernetes protobuf encoding, for the kinds for which Go clients use it.

Helm stores releases in Secrets (or ConfigMaps) and kubectl sends access reviews this way; other
kinds arrive as JSON. Responses are always JSON, which those clients accept.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError

from kubernetes_double.api.requests.errors import bad_request, unsupported

Object = dict[str, Any]
MAGIC = b"k8s\x00"
MEDIA = "application/vnd.kubernetes.protobuf"

MESSAGES = """
TypeMeta apiVersion=1 kind=2
Unknown typeMeta:TypeMeta=1 raw:bytes=2 contentEncoding=3 contentType=4
OwnerReference kind=1 name=3 uid=4 apiVersion=5 controller:bool=6 blockOwnerDeletion:bool=7
ObjectMeta name=1 generateName=2 namespace=3 uid=5 resourceVersion=6 labels{string}=11 \
annotations{string}=12 ownerReferences[OwnerReference]=13 finalizers[string]=14
Secret metadata:ObjectMeta=1 data{bytes}=2 type=3 stringData{string}=4 immutable:bool=5
ConfigMap metadata:ObjectMeta=1 data{string}=2 binaryData{bytes}=3 immutable:bool=4
Preconditions uid=1 resourceVersion=2
DeleteOptions gracePeriodSeconds:int64=1 preconditions:Preconditions=2 orphanDependents:bool=3 \
propagationPolicy=4 dryRun[string]=5
ResourceAttributes namespace=1 verb=2 group=3 version=4 resource=5 subresource=6 name=7
NonResourceAttributes path=1 verb=2
SelfSubjectAccessReviewSpec resourceAttributes:ResourceAttributes=1 \
nonResourceAttributes:NonResourceAttributes=2
SelfSubjectAccessReview metadata:ObjectMeta=1 spec:SelfSubjectAccessReviewSpec=2
"""
"""Name, then fields: `name` (string), `name:type`, `name[type]` (repeated), `name{type}` (map)."""

Field = descriptor_pb2.FieldDescriptorProto
SCALARS = {
    "string": Field.TYPE_STRING,
    "bytes": Field.TYPE_BYTES,
    "bool": Field.TYPE_BOOL,
    "int64": Field.TYPE_INT64,
}


class Decoder:
    """Reads enveloped protobuf bodies."""

    def __init__(self) -> None:
        file = descriptor_pb2.FileDescriptorProto(name="kubernetes.proto", package="k8s")
        for line in MESSAGES.strip().splitlines():
            name, *fields = line.split()
            message = file.message_type.add(name=name)
            for field in fields:
                _add(message, field)
        self._pool = descriptor_pool.DescriptorPool()
        self._pool.Add(file)
        self._known = {one.name for one in file.message_type}

    def decode(self, body: bytes) -> Object:
        """Decode to a JSON object. Raises a 400 or, for an unsupported kind, a 415."""
        if not body.startswith(MAGIC):
            raise bad_request("the body does not start with the protobuf prefix of Kubernetes")
        envelope = self._message("Unknown", body[len(MAGIC) :])
        kind = envelope.typeMeta.kind
        if kind not in self._known:
            raise unsupported(f"{MEDIA} of kind {kind!r}")
        found = json_format.MessageToDict(self._message(kind, envelope.raw))
        version = {"apiVersion": envelope.typeMeta.apiVersion, "kind": kind}
        return {**_said(found), **version}

    def _message(self, name: str, raw: bytes) -> Any:
        kind = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"k8s.{name}"))
        try:
            return kind.FromString(raw)
        except DecodeError as error:
            raise bad_request(f"cannot read the protobuf of a {name}: {error}") from error


def _add(message: descriptor_pb2.DescriptorProto, text: str) -> None:
    left, _, number = text.partition("=")
    name = left.split(":")[0].split("[")[0].split("{")[0]
    kind = left[len(name) :].strip(":[]{}") or "string"
    field = message.field.add(name=name, number=int(number), label=Field.LABEL_OPTIONAL)
    if "{" in left:
        entry = f"{name[0].upper()}{name[1:]}Entry"
        nested = message.nested_type.add(name=entry)
        nested.options.map_entry = True
        nested.field.add(name="key", number=1, type=Field.TYPE_STRING, label=Field.LABEL_OPTIONAL)
        nested.field.add(name="value", number=2, type=SCALARS[kind], label=Field.LABEL_OPTIONAL)
        kind = f"{message.name}.{entry}"
    if "[" in left or "{" in left:
        field.label = Field.LABEL_REPEATED
    if kind in SCALARS:
        field.type = SCALARS[kind]
    else:
        field.type = Field.TYPE_MESSAGE
        field.type_name = f".k8s.{kind}"


def _said(value: Any) -> Any:
    """Drop the empty strings and messages that Go encodes where JSON would omit the field."""
    if isinstance(value, dict):
        parts = {name: _said(one) for name, one in value.items()}
        return {name: one for name, one in parts.items() if one not in ("", {})}
    return value
