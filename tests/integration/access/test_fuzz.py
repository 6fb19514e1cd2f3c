"""Fuzzes all routes and methods: every response is a documented one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import schemathesis
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from paceline.enums import WorkerKind
from paceline.platform.transport.rpc_authorization import allowed_callers
from paceline.v1 import access_pb2, experience_pb2, jobs_pb2, roster_pb2, tenants_pb2
from paceline_gateway.http.server import MAX_HEADER_BYTES
from paceline_harness.callers.service_keys import metadata_of
from paceline_harness.messages.hostile_text import mutants
from paceline_harness.patience import PATIENCE_S

if TYPE_CHECKING:
    from conftest import Site
else:
    Site = Any

FEW = settings(
    max_examples=8,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
    ],
    # What fails is shown as it was found: each try is a request.
    phases=[Phase.explicit, Phase.generate],
)
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
GATEWAY = [
    service
    for file, name in ((jobs_pb2, "Jobs"), (access_pb2, "Access"), (tenants_pb2, "Tenants"))
    for service in [file.DESCRIPTOR.services_by_name[name]]
]
EXPERIENCE = [
    *GATEWAY,
    access_pb2.DESCRIPTOR.services_by_name["Authentication"],
    experience_pb2.DESCRIPTOR.services_by_name["Experience"],
    roster_pb2.DESCRIPTOR.services_by_name["Roster"],
]
# What says that we, not the caller, did something wrong.
OURS = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
# The answer to a request whose head is larger than any route needs.
UNREAD = b"Invalid HTTP request received."
schemathesis.serializer.alias("application/zip", "application/octet-stream")
TEXTS = st.sampled_from(
    ["", "\0", "x" * 5_000, "\u0661", "-1", "9" * 40, "*", "{", "[" * 2_000, "\u2028", "a", "nan"]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.sampled_from([-(2**63), -1, 0, 1, 2**53, 2**63 - 1]),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 5),
}


async def test_no_request_over_rest_breaks_anything(peopled: Site) -> None:
    schema = schemathesis.openapi.from_dict(peopled.app.openapi())
    found: list[Any] = list(schema.get_all_operations())
    operations = [each.ok() for each in found]
    assert len(operations) >= 16
    for operation in operations:
        for mode in GenerationMode:
            await asyncio.to_thread(rest, peopled, operation, mode)
    await unhurt(peopled)


def rest(site: Site, operation: Any, mode: GenerationMode) -> None:
    headers = {"authorization": f"Bearer {site.tokens['all']}"}

    @FEW
    @given(operation.as_strategy(generation_mode=mode), st.booleans())
    def tries(case: Any, real: bool) -> None:
        parameters = case.path_parameters or {}
        if real and "job_id" in parameters and not operation.path.endswith("/events"):
            parameters["job_id"] = site.ids["job"]
        response = case.call(base_url=site.url, headers=headers, timeout=PATIENCE_S)
        if response.content == UNREAD:
            assert len(response.request.url or "") > MAX_HEADER_BYTES // 2
            return
        case.validate_response(response, checks=CHECKS)

    tries()


async def test_no_message_to_the_gateway_breaks_anything(peopled: Site) -> None:
    metadata = (("authorization", f"Bearer {peopled.tokens['all']}"),)
    with grpc.insecure_channel(peopled.grpc) as channel:
        for service in GATEWAY:
            for method in service.methods:
                await asyncio.to_thread(grpcs, peopled, channel, method, metadata)
    await unhurt(peopled)


async def test_no_message_of_a_service_breaks_the_ledger(peopled: Site) -> None:
    folder, ledger = peopled.run_dir / "keys", WorkerKind.EXPERIENCE
    with grpc.insecure_channel(peopled.experience) as channel:
        for service in EXPERIENCE:
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                kind = min(allowed_callers(ledger, path) or {WorkerKind.GATEWAY})
                metadata = metadata_of(folder, ledger, kind)
                await asyncio.to_thread(grpcs, peopled, channel, method, metadata)
    await unhurt(peopled)


def grpcs(site: Site, channel: grpc.Channel, method: Any, metadata: Any) -> None:
    kind = message_factory.GetMessageClass(method.input_type)
    known = [site.ids["job"], "a", "default", "train", "read"]
    whole = messages(method.input_type, known).map(lambda made: made.SerializeToString())

    @FEW
    @given(whole | st.binary(max_size=100))
    def tries(data: bytes) -> None:
        code, text = answer(channel, method, data, metadata)
        assert code not in OURS, (method.full_name, code, text, data, shown(kind, data))

    tries()


async def test_no_text_is_the_fault_of_the_gateway(peopled: Site) -> None:
    metadata = (("authorization", f"Bearer {peopled.tokens['all']}"),)
    await asyncio.to_thread(texts, peopled, peopled.grpc, GATEWAY, metadata)
    await unhurt(peopled)


async def test_no_text_is_the_fault_of_the_experience_service(peopled: Site) -> None:
    await asyncio.to_thread(texts, peopled, peopled.experience, EXPERIENCE, ())
    await unhurt(peopled)


def texts(site: Site, address: str, services: list[Any], metadata: Any) -> None:
    """Send each hostile text in each text field of each method that answers at once."""
    with grpc.insecure_channel(address) as channel:
        methods = [each for service in services for each in service.methods]
        for method in methods:
            if method.server_streaming:
                continue
            for path, message in mutants(plausible(site, method)):
                data = message.SerializeToString()
                code, text = answer(channel, method, data, metadata)
                assert code not in OURS, (method.full_name, path, code, text, data[:200])


def plausible(site: Site, method: Any) -> Message:
    """A request that gets as far as the fields that it does not fill."""
    made: Any = message_factory.GetMessageClass(method.input_type)()
    ids = {"job_id": site.ids["job"], "tenant": "a", "worker_id": "w", "name": "x", "role": "read"}
    for field in method.input_type.fields:
        if field.name in ids and field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            setattr(made, field.name, ids[field.name])
    return made


def answer(
    channel: grpc.Channel, method: Any, data: bytes, metadata: Any
) -> tuple[grpc.StatusCode, str]:
    name = f"/{method.containing_service.full_name}/{method.name}"
    requests = "stream" if method.client_streaming else "unary"
    replies = "stream" if method.server_streaming else "unary"
    stub: Callable[..., Any] = getattr(channel, f"{requests}_{replies}")(name)
    given_ = iter([data]) if method.client_streaming else data
    # What has nothing to tell for so long is well.
    timeout_s = 1 if method.server_streaming else 60
    try:
        call = stub(given_, timeout=timeout_s, metadata=metadata)
        if method.server_streaming:
            next(call, None)
            call.cancel()
    except grpc.RpcError as refused:
        error: Any = refused
        if method.server_streaming and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return grpc.StatusCode.OK, ""
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def shown(kind: Any, data: bytes) -> str:
    try:
        return str(kind.FromString(data))
    except Exception as error:  # for the message of a failure only
        return str(error)


def messages(kind: Descriptor, known: list[str], depth: int = 2) -> st.SearchStrategy[Any]:
    """Messages of a type; strings may be ids of existing objects."""
    made = message_factory.GetMessageClass(kind)
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for field in kind.fields:
        strategy = values(field, known, depth)
        if strategy is not None:
            fields[field.name] = strategy
    return st.fixed_dictionaries({}, optional=fields).map(lambda given_: made(**given_))


def values(field: Any, known: list[str], depth: int) -> st.SearchStrategy[Any] | None:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_MESSAGE:
        if depth == 0 or field.message_type.GetOptions().map_entry:
            return None
        strategy = messages(field.message_type, known, depth - 1)
    elif kind == FieldDescriptor.CPPTYPE_STRING:
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        strategy = st.binary(max_size=40) if is_bytes else st.sampled_from(known) | TEXTS
    else:
        strategy = NUMBERS[kind]
    return st.lists(strategy, max_size=3) if field.is_repeated else strategy


async def unhurt(site: Site) -> None:
    """A regular client is still served."""
    async with site.client("all") as client:
        assert (await client.get(site.ids["job"])).status.job_id == site.ids["job"]
    async with site.client("read-b") as client:
        seen = [job.status.job_id for job in (await client.list()).jobs]
        assert site.ids["job"] not in seen


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
