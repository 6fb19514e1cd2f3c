import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidError
from paceline.types import PolicyVersion
from paceline.v1 import roster_pb2 as pb
from paceline.weights import wire
from paceline.weights.holdings import Holder, Holdings, Published
from paceline.weights.route import EVENTS, Route, Source, TransferProgress, TransferReport

text = st.text(max_size=8)
count = st.integers(0, 2**31 - 1)
real = st.floats(0, 1e12)
versions = st.builds(PolicyVersion, version=count, step=count, digest=text, num_bytes=count)
several = st.lists(text, max_size=3).map(tuple)
sources = st.integers(1, 9).flatmap(
    lambda parts: st.builds(Source, text, st.integers(0, parts - 1), st.just(parts))
)
progress = st.builds(TransferProgress, count, count, count, several)
routes = st.builds(
    Route,
    version=versions,
    sources=st.lists(sources, max_size=3).map(tuple),
    fallbacks=several,
    bytes_per_s=real,
    base_version=st.integers(-1, 99),
    key=st.binary(max_size=32),
)
reports = st.builds(
    TransferReport,
    worker_id=text,
    version=count,
    endpoint=text,
    event=st.sampled_from(EVENTS),
    num_bytes=count,
    wire_bytes=count,
    busy_s=real,
    latency_s=real,
    num_ready=count,
    num_chunks=count,
    base_version=st.integers(-1, 99),
    detail=text,
)
holders = st.builds(
    Holder,
    worker_id=text,
    kind=text,
    site=text,
    endpoint=text,
    active_version=st.integers(-1, 99),
    transfers=st.lists(progress, max_size=2).map(tuple),
    sources=st.lists(sources, max_size=2).map(tuple),
    bytes_per_s=real,
    trouble=text,
)
holdings = st.builds(
    Holdings,
    st.lists(st.builds(Published, versions, count, text, real, real), max_size=2).map(tuple),
    st.lists(holders, max_size=2).map(tuple),
)


@given(routes)
def test_routes_survive_the_wire(noun: Route) -> None:
    data = wire.route_to(noun).SerializeToString()
    assert wire.route_from(pb.Route.FromString(data)) == noun


@given(reports)
def test_reports_survive_the_wire(noun: TransferReport) -> None:
    message = wire.report_to(noun, job_id="j")
    assert message.job_id == "j"
    data = message.SerializeToString()
    assert wire.report_from(pb.ReportTransferRequest.FromString(data)) == noun


@given(holdings)
def test_holdings_survive_the_wire(noun: Holdings) -> None:
    data = wire.holdings_to(noun).SerializeToString()
    assert wire.holdings_from(pb.ListWeightsReply.FromString(data)) == noun


def test_no_part_at_all_is_everything() -> None:
    assert wire.source_from(pb.Source(endpoint="a")) == Source("a", 0, 1)


@pytest.mark.parametrize(("part", "parts"), [(2, 2), (-1, 2), (1, 0)])
def test_a_part_that_there_cannot_be_is_named(part: int, parts: int) -> None:
    with pytest.raises(InvalidError, match=f"part: {part} of {parts}"):
        wire.source_from(pb.Source(part=part, parts=parts))


def test_an_event_that_nobody_knows_is_named() -> None:
    with pytest.raises(InvalidError, match="event: 'gone'; allowed: done, moved"):
        wire.report_from(pb.ReportTransferRequest(event="gone"))
