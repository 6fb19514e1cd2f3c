"""Parts of the SGLang engine that need no server."""

from __future__ import annotations

import json
import pickle
from base64 import b64decode
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import AuthenticationError, InvalidError, NotFoundError, UnavailableError
from paceline.plugins import EngineRequest
from paceline.testing.engines import ask, snapshot
from paceline.types import VersionRun
from paceline_harness.patience import PATIENCE_S
from paceline_harness.sglang import KNOBS, FakeSglang
from paceline_rollout.engines.sglang.answers import (
    ServerRequest,
    body_of,
    num_mislabelled,
    stale_start,
    take,
    verdict,
)
from paceline_rollout.engines.sglang.api import SglangClient, error_text
from paceline_rollout.engines.sglang.capabilities import parse_version
from paceline_rollout.engines.sglang.loading import buckets_of, pack, write_safetensors

ERRORS = [
    ({"success": False, "message": "no session"}, "no session"),
    ({"error": {"message": "too long"}}, "too long"),
    ({"error": "unknown key"}, "unknown key"),
    ({"object": "error", "message": "bad type"}, "bad type"),
]


@pytest.mark.parametrize(("content", "text"), ERRORS)
def test_all_forms_of_errors(content: dict[str, Any], text: str):
    assert error_text(json.dumps(content).encode()) == text


def test_an_error_without_form_is_quoted():
    assert error_text(b"Internal Server Error") == "Internal Server Error"
    assert error_text(b"[1, 2]") == "[1, 2]"


@pytest.mark.parametrize(
    ("version", "sessions", "spans", "incremental"),
    [
        ("0.5.6", False, False, False),
        ("0.5.20", False, True, False),
        ("0.5.21.post1", True, True, False),
        ("v0.5.23", True, True, True),
        ("0.6", True, True, True),
        ("0.0.0.dev1+gabc", True, True, True),
        ("main", True, True, True),
    ],
)
def test_capabilities(version: str, sessions: bool, spans: bool, incremental: bool):
    known = parse_version(version)
    assert (known.sessions, known.spans, known.incremental) == (sessions, spans, incremental)


def test_too_old():
    with pytest.raises(InvalidError, match=r"version 0\.5\.5; allowed: 0\.5\.6 or newer"):
        parse_version("0.5.5")


def slot(**changes: Any) -> ServerRequest:
    fields: dict[str, Any] = {"rid": "r", "version": 3, **changes}
    return ServerRequest(ask("a"), max_tokens=8, **fields)


cuts = st.sets(st.integers(1, 19)).map(lambda inner: [0, *sorted(inner), 20])


@given(ends=cuts, boundary=st.integers(0, 20), incremental=st.booleans())
def test_events_in_any_portions(ends: list[int], boundary: int, incremental: bool):
    one, got, runs = slot(), list[int](), list[VersionRun]()
    spans = [
        {"version": "3", "start": 0, "end": boundary},
        {"version": "4", "start": boundary, "end": 20},
    ]
    # No event spans a swap: the server passes everything on before it changes its weights.
    ends = sorted({*ends, boundary})
    for start, end in pairwise(ends):
        first = start if incremental else 0
        meta: dict[str, Any] = {
            "completion_tokens": end,
            "weight_version": "3" if end <= boundary else "4",
            "output_token_logprobs": [[-float(t), t, None] for t in range(first, end)],
        }
        if end == 20:
            meta["weight_versions"] = spans
        event = {"output_ids": list(range(first, end)), "meta_info": meta}
        emission = take(one, event)
        assert emission is not None
        assert emission.logprobs == tuple(-float(t) for t in emission.tokens)
        got.extend(emission.tokens)
        runs.extend(emission.versions)
        assert num_mislabelled(one, event) == 0
    assert got == list(range(20)) == one.tokens
    assert [r.version for r in runs for _ in range(r.count)] == [3] * boundary + [4] * (
        20 - boundary
    )


def test_a_wrong_label_is_noticed():
    one = slot()
    meta: dict[str, Any] = {"completion_tokens": 2, "output_token_logprobs": [[-1.0, 5, None]] * 2}
    take(one, {"output_ids": [5, 5], "meta_info": {**meta, "weight_version": "4"}})
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    assert num_mislabelled(one, {"meta_info": {**meta, "weight_versions": spans}}) == 1


def event(version: str, total: int) -> dict[str, Any]:
    rows = [[-1.0, 7, None]] * total
    meta = {"completion_tokens": total, "weight_version": version, "output_token_logprobs": rows}
    return {"output_ids": [7] * total, "meta_info": meta}


def test_an_answer_started_by_a_later_version_is_requested_again():
    one = slot()
    assert not stale_start(one, event("4", 0))
    assert not stale_start(one, event("3", 1))
    assert stale_start(one, event("4", 1))
    assert verdict(one, {"type": "stale"}) == (None, "")
    take(one, event("3", 1))
    assert not stale_start(one, event("4", 2))


def test_an_event_without_news_is_nothing():
    meta = {"completion_tokens": 0, "output_token_logprobs": []}
    assert take(slot(), {"output_ids": [], "meta_info": meta}) is None


def test_a_continued_request_asks_for_the_rest():
    body = body_of(slot(tokens=[7, 8]), deterministic=True)
    assert body["input_ids"] == [1, 2, 3, 7, 8]
    assert body["sampling_params"]["max_new_tokens"] == 6
    assert body["sampling_params"]["ignore_eos"]
    assert set(body["sampling_params"]) <= KNOBS


def test_all_sampling_parameters_exist_in_sglang():
    request: EngineRequest = ask("a", stop_tokens=(5,), stop_strings=("x",), top_k=3, seed=1 << 40)
    knobs = body_of(ServerRequest(request, max_tokens=4), deterministic=True)["sampling_params"]
    assert set(knobs) <= KNOBS
    assert (knobs["stop_token_ids"], knobs["top_k"]) == ([5], 3)
    assert 0 <= knobs["sampling_seed"] < 1 << 31


# weights ------------------------------------------------------------------------------------


@pytest.fixture
def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))


@pytest.mark.parametrize("most_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("shared", [False, True])
def test_buckets_carry_all(small: torch.nn.Module, most_bytes: int, shared: bool):
    found: dict[str, torch.Tensor] = {}
    for bucket in buckets_of(snapshot(small, 1), most_bytes):
        held, payload = pack(bucket, shared_memory=shared)
        content = pickle.loads(b64decode(payload))
        for meta in content["metadata"]:
            data = content["flattened_tensor"][meta.start_idx : meta.end_idx]
            found[meta.name] = data.view(meta.dtype).reshape(meta.shape).clone()
        del held
    assert found.keys() == dict(small.named_parameters()).keys()
    assert all(torch.equal(found[n], p) for n, p in small.named_parameters())


def test_the_file_is_what_others_read(small: torch.nn.Module, tmp_path: Path):
    from safetensors.torch import load_file

    write_safetensors(tmp_path / "x.safetensors", snapshot(small, 1))
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[n], p) for n, p in small.named_parameters())


# the wire -----------------------------------------------------------------------------------


async def test_statuses_become_errors():
    fake = FakeSglang(vocab_size=32, context=64, version="0.5.23", api_key="secret")
    url = await fake.start()
    good, bad = SglangClient(url, api_key="secret"), SglangClient(url)
    with pytest.raises(AuthenticationError):
        await bad.server_info()
    with pytest.raises(InvalidError, match="mode never: unknown"):
        await good.pause("never")
    with pytest.raises(InvalidError, match="input_ids is empty"):
        await good.generate({"input_ids": []}, timeout_s=PATIENCE_S)
    with pytest.raises(InvalidError, match="no weight update is open"):
        await good.end_update()
    with pytest.raises(NotFoundError):
        await good.join_group({})
    await fake.stop()
    with pytest.raises(UnavailableError):
        await good.server_info()
    for client in (good, bad):
        await client.close()


async def test_an_answer_that_breaks_off():
    async def half(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        await reply.write(b'data: {"meta_info": 1}\n\ndata: {"meta')
        assert request.transport is not None
        request.transport.close()
        return reply

    app = web.Application()
    app.router.add_post("/generate", half)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = SglangClient(f"http://127.0.0.1:{runner.addresses[0][1]}")
    got: list[dict[str, Any]] = []

    async def read() -> None:
        async for event in client.stream({}):
            got.append(event)

    with pytest.raises(UnavailableError):
        await read()
    assert got == [{"meta_info": 1}]
    await client.close()
    await runner.cleanup()
