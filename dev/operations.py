"""Generates SDK methods and tables of the docs from options in the protos."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from pydantic import BaseModel

from paceline.enums import WorkerKind
from paceline.front.api.documents import document_of
from paceline.platform.transport.job_credential import JOB_KINDS
from paceline.platform.transport.operations import HttpRoute, Operation, for_users
from paceline.platform.transport.rpc_authorization import Callers, callers
from paceline.plugins import StrictModel

ROOT = Path(__file__).parents[1]
SDK = ROOT / "shared" / "paceline" / "front" / "client" / "operations.py"
BEGIN, END = "<!-- table: dev/operations.py -->\n", "<!-- end of table -->\n"
# Job files, archives and event streams: these methods are handwritten, in `client.py`.
BY_HAND = frozenset({"SubmitJob", "UploadCode", "WatchJob"})
HEAD = '''"""A method for each operation of the REST API. Made by dev/operations.py."""

from __future__ import annotations

from collections.abc import Sequence

{imports}
from paceline.front.client.calls import RestCall, View

'''
CLASS = '''
class {name}:
    """{about}"""

    {asynchronous}def send(self, request: RestCall[View]) -> View:
        """Send one call."""
        raise NotImplementedError

'''
METHOD = '''    {asynchronous}def {name}({parameters}) -> {view}:
        """{summary}"""
{body}

'''
KINDS = {
    FieldDescriptor.CPPTYPE_STRING: "str",
    FieldDescriptor.CPPTYPE_INT32: "int",
    FieldDescriptor.CPPTYPE_INT64: "int",
    FieldDescriptor.CPPTYPE_DOUBLE: "float",
    FieldDescriptor.CPPTYPE_BOOL: "bool",
    FieldDescriptor.CPPTYPE_ENUM: "str",
}


def files() -> dict[Path, str]:
    """Path and content of every file."""
    api, security = ROOT / "docs" / "api.md", ROOT / "docs" / "security.md"
    return {
        SDK: _formatted(sdk()),
        api: _with_table(api, routes()),
        security: _with_table(security, rows()),
    }


def sdk() -> str:
    """Source of the SDK module."""
    found = sorted((each for each in for_users() if _is_made(each)), key=lambda each: each.name)
    documents = {document_of(each.reply.DESCRIPTOR.name) for each in found}
    documents |= {_body(field) for each in found for field in _fields(each) if field.message_type}
    imports = sorted(f"from {each.__module__} import {each.__name__}" for each in documents)
    head = HEAD.format(imports="\n".join(imports))
    return head + "".join(
        CLASS.format(name=name, about=about, asynchronous=prefix)
        + "".join(_method(each, prefix) for each in found)
        for name, about, prefix in (
            ("Operations", "Calls of `Client`.", ""),
            ("AsyncOperations", "Calls of `AsyncClient`.", "async "),
        )
    )


def name_of(operation: str) -> str:
    """Name in the SDK: `ListWeights` is `list_weights`; `Job` is dropped, so `GetJob` is `get`."""
    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", operation).lower()
    return re.sub(r"_jobs?$", "", snake)


def _is_made(each: Operation) -> bool:
    return bool(each.routes) and each.name not in BY_HAND


def _fields(each: Operation) -> list[Any]:
    return list(each.request.DESCRIPTOR.fields)


def _body(field: Any) -> type[BaseModel]:
    """What users hand over: a document that only tells more of a model of ours is that model."""
    document = document_of(field.message_type.name)
    base = document.__mro__[1]
    return document if base in (BaseModel, StrictModel) else base


def _method(each: Operation, prefix: str) -> str:
    route = each.routes[0]
    needed = [field for field in _fields(each) if f"{{{field.name}}}" in route.path]
    first = needed or [field for field in _fields(each)[:1] if route.body == "*"]
    others = [field for field in _fields(each) if field not in first]
    parameters = ["self", *(f"{field.name}: {_kind(field)}" for field in first)]
    parameters += ["*", *map(_optional, others)] if others else []
    return METHOD.format(
        asynchronous=prefix,
        name=name_of(each.name),
        parameters=", ".join(parameters),
        view=document_of(each.reply.DESCRIPTOR.name).__name__,
        summary=each.summary,
        body="\n".join(_lines(each, route, prefix)),
    )


def _lines(each: Operation, route: HttpRoute, prefix: str) -> Iterator[str]:
    view = document_of(each.reply.DESCRIPTOR.name).__name__
    wait = "await " if prefix else ""
    if route.body and route.body != "*":
        other = next(binding for binding in each.routes if not binding.body)
        yield f"        if {route.body} is None:"
        yield f"            return {wait}self.send({_call(each, other, view)})"
    yield f"        return {wait}self.send({_call(each, route, view)})"


def _call(each: Operation, route: HttpRoute, view: str) -> str:
    names = [field.name for field in _fields(each)]
    in_path = [name for name in names if f"{{{name}}}" in route.path]
    given = [f'"{route.method}"', f'{"f" if in_path else ""}"{route.path}"', view]
    if route.body == "*":
        pairs = ", ".join(f'"{name}": {name}' for name in names if name not in in_path)
        given.append(f"body={{{pairs}}}")
    elif route.body:
        given.append(f"body={route.body}")
    else:
        fields = [f for f in _fields(each) if f.name not in in_path and not f.message_type]
        if fields:
            pairs = ", ".join(f'"{field.name}": {field.name}' for field in fields)
            given.append(f"params={{{pairs}}}")
    return f"RestCall({', '.join(given)})"


def _kind(field: Any) -> str:
    if field.message_type:
        return _body(field).__name__
    kind = KINDS[field.cpp_type]
    return f"Sequence[{kind}]" if field.is_repeated else kind


def _optional(field: Any) -> str:
    kind = _kind(field)
    if field.is_repeated:
        return f"{field.name}: {kind} = ()"
    if kind == "str" and not field.has_presence:
        return f'{field.name}: str = ""'
    return f"{field.name}: {kind} | None = None"


def routes() -> Iterator[str]:
    """Rows of the table in docs/api.md."""
    yield "| operation | REST | gRPC | role |"
    yield "|---|---|---|---|"
    for each in sorted(for_users(), key=lambda each: each.service != "Jobs"):
        route = each.routes[0]
        asked = [field.name for field in _fields(each) if f"{{{field.name}}}" not in route.path]
        shown = asked and _is_made(each) and route.method == "GET"
        query = f"?{'&'.join(asked)}" if shown else ""
        rest = ", ".join(f"`{route.method} {route.path}{query}`" for route in each.routes)
        yield f"| {each.summary} | {rest} | `{each.service}/{each.name}` | {each.role} |"


def rows() -> Iterator[str]:
    """Rows of the table in docs/security.md."""
    yield "| server | service | methods | who may call them |"
    yield "|---|---|---|---|"
    for server, services in callers().items():
        for service, methods in services.items():
            if service != "Health":
                yield from _rows(server, service, methods)


def _rows(server: str, service: str, methods: Mapping[str, Callers]) -> Iterator[str]:
    together: dict[str, list[str]] = {}
    for method, who in methods.items():
        names = "users, by their token" if who is None else _named(who)
        together.setdefault(names, []).append(f"`{method}`")
    for names, found in together.items():
        yield f"| {server} | {service} | {', '.join(found)} | {names} |"


def _named(kinds: Set[WorkerKind]) -> str:
    """Those that also need the credential of a job say so."""
    names = (f"{kind} of the job" if kind in JOB_KINDS else str(kind) for kind in sorted(kinds))
    return ", ".join(names) or "nobody"


def _with_table(page: Path, lines: Iterator[str]) -> str:
    head, _, rest = page.read_text().partition(BEGIN)
    table = "".join(f"{line}\n" for line in lines)
    return head + BEGIN + table + END + rest.partition(END)[2]


def _formatted(code: str) -> str:
    """Format and lint the source as `make check` requires."""
    for command in (("check", "--select=I", "--fix"), ("format",)):
        ruff = [sys.executable, "-m", "ruff", *command, "--quiet", f"--stdin-filename={SDK}", "-"]
        code = subprocess.run(ruff, input=code, capture_output=True, text=True, check=True).stdout
    return code
