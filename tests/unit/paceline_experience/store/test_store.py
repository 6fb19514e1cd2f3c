"""How a store is found, waited for and refused; no password is told to anyone."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import RedisError

from paceline.errors import StoreError
from paceline.front.local.store import server_binary
from paceline.platform.store_url import without_secrets
from paceline_controller.certificates.pair import make_authority, make_leaf
from paceline_experience.store.store import Store
from paceline_harness.patience import PATIENCE_S

PASSWORD = "hush@/hush?#%:& hush"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Path]:
    """The socket of a server that wants the password."""
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        socket = Path(folder) / "s"
        words = ["--port", "0", "--unixsocket", str(socket), "--requirepass", PASSWORD]
        server = subprocess.Popen([str(server_binary()), *words], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        while not answers(socket):
            assert time.monotonic() < deadline, "the server does not come up"
            time.sleep(0.02)
        yield socket
        server.kill()
        server.wait()


def answers(socket: Path) -> bool:
    with Redis(unix_socket_path=str(socket), password=PASSWORD) as client, suppress(RedisError):
        return bool(client.ping())
    return False


@asynccontextmanager
async def forwarded(socket: Path, context: ssl.SSLContext | None = None) -> AsyncGenerator[int]:
    """A TCP port in front of a server, with TLS if a context is given."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_unix_connection(str(socket))
        await asyncio.gather(copy(reader, outer), copy(inner, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    server.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://user:hush@127.0.0.1:1/0", "store_url redis://127.0.0.1:1/0: "),
        ("redis://127.0.0.1:1/0?password=hush", "store_url redis://127.0.0.1:1/0: "),
        ("redis://127.0.0.1:1/0?password=hu@sh", "store_url redis://...: "),
        ("unix://:hush@/nowhere/s", "store_url unix:///nowhere/s: "),
        ("redis+cluster://:hush@127.0.0.1:1", "store_url redis+cluster://127.0.0.1:1: "),
        ("mysql://user:hush@db/0", "store_url mysql://db/0: has an unknown scheme; use one"),
        ("redis://user:hush@db:many", "store_url redis://db:many: its host, port or options "),
        ("redis://:/hush@db", "store_url redis://db: its host, port or options cannot be parsed; "),
        (
            "redis://:hu?sh@db",
            "store_url redis://...: its host, port or options cannot be parsed; ",
        ),
        ("hush", "store_url (not a URL): has an unknown scheme"),
    ],
)
async def test_a_store_that_cannot_be_used_is_named_without_its_password(
    url: str, says: str
) -> None:
    with pytest.raises(StoreError) as caught:
        await Store.connect(url)
    assert str(caught.value).startswith(says)
    assert "hush" not in str(caught.value)


@given(password=st.text(min_size=1), path=st.sampled_from(["/0", "", "/0?socket_timeout=1"]))
def test_a_password_is_never_shown(password: str, path: str) -> None:
    marked = f"S3CRET{password}S3CRET"
    for text in (marked, quote(marked, safe="")):
        assert "S3CRET" not in without_secrets(f"redis://user:{text}@db:6379{path}")
        assert "S3CRET" not in without_secrets(f"redis://db:6379/0?password={text}")


@pytest.mark.parametrize("user", ["", "default"])
async def test_a_password_may_have_any_characters(guarded: Path, user: str) -> None:
    store = await Store.connect(f"unix://{user}:{quote(PASSWORD, safe='')}@{guarded}")
    assert await store.now() > 0
    await store.close()


def waits(caplog: pytest.LogCaptureFixture) -> int:
    """How often a store was said to be waited for."""
    return [record.getMessage() for record in caplog.records].count("waiting for the store")


async def test_refused_credentials_are_not_tried_again(
    guarded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for url in (f"unix://:wrong-hush@{guarded}", f"unix://{guarded}"):
        with pytest.raises(StoreError, match="the credentials are refused: ") as caught:
            await Store.connect(url, wait_s=60)
        assert "hush" not in str(caught.value)
    assert not waits(caplog)
    assert "hush" not in caplog.text


async def test_tls_with_an_own_authority(guarded: Path, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    authority = make_authority(["localhost"], now=now, days=1)
    leaf = make_leaf(authority, "store", ["localhost"], now=now, days=1)
    files: dict[str, bytes] = {
        "ca.crt": authority.certificate_pem,
        "other.crt": make_authority([], now=now, days=1).certificate_pem,
        "tls.crt": leaf.certificate_pem,
        "tls.key": leaf.key_pem,
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    async with forwarded(guarded, context) as port:
        url = f"rediss://:{quote(PASSWORD, safe='')}@localhost:{port}/0?ssl_ca_certs={tmp_path}"
        store = await Store.connect(f"{url}/ca.crt")
        assert await store.now() > 0
        await store.close()
        with pytest.raises(StoreError, match=f"store_url rediss://localhost:{port}/0: .*verify"):
            await Store.connect(f"{url}/other.crt")


async def test_a_store_that_comes_later_is_waited_for(
    guarded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    late = tmp_path / "late"
    url = f"unix://:{quote(PASSWORD, safe='')}@{late}"
    connecting = asyncio.create_task(Store.connect(url, wait_s=60))
    while waits(caplog) < 2:
        assert not connecting.done()
        await asyncio.sleep(0.01)
    late.symlink_to(guarded)
    store = await asyncio.wait_for(connecting, PATIENCE_S)
    await store.close()
    assert all("hush" not in str(record.__dict__) for record in caplog.records)


async def test_an_unresponsive_store_is_given_up(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"store_url unix:.*/none: "):
        await Store.connect(f"unix://{tmp_path}/none", wait_s=1.0)
    assert 0.3 < time.monotonic() - began < 60


def test_the_process_logs_it_and_exits(tmp_path: Path) -> None:
    """As it would in a pod; the kubelet starts it again."""
    settings = {
        "kind": "experience",
        "worker_id": "e",
        "run_dir": str(tmp_path),
        "store_url": "redis://:hush@127.0.0.1:1/0",
        "insecure": True,
        "options": {"store_wait_s": 1.0},
    }
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "paceline_experience", str(tmp_path / "settings.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 3
    assert "waiting for the store store=redis://127.0.0.1:1/0" in ended.stderr
    assert "StoreError: store_url redis://127.0.0.1:1/0: " in ended.stderr
    assert "hush" not in ended.stderr + ended.stdout


async def test_a_full_store_reports_that_it_is_out_of_memory(store: Store) -> None:
    await store.command("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(StoreError, match="OOM: the store is full: command not allowed"):
            await store.command("SET", "a", "b")
        with pytest.raises(StoreError, match="OOM: the store is full: command not allowed"):
            await store.run("job_write", ["a", "b"], "spec", "field", "value")
    finally:
        await store.command("CONFIG", "SET", "maxmemory", "0")


async def test_a_new_password_beside_the_old_one_interrupts_nobody() -> None:
    """Both are right for a while; then the old one opens nothing, and the new one still does."""
    with tempfile.TemporaryDirectory(prefix="pl") as folder:
        socket = Path(folder) / "s"
        words = ["--port", "0", "--unixsocket", str(socket), "--requirepass", PASSWORD]
        server = subprocess.Popen([str(server_binary()), *words], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not answers(socket):
            assert time.monotonic() < deadline, "the server does not come up"
            await asyncio.sleep(0.02)

        def client(password: str) -> AsyncRedis:
            return AsyncRedis(unix_socket_path=str(socket), password=password, socket_timeout=None)

        before = Store(client(PASSWORD))
        await before.command("SET", "a", "1")
        await before.command("ACL", "SETUSER", "default", ">another")
        after = Store(client("another"))
        assert await after.command("GET", "a") == await before.command("GET", "a") == b"1"
        await after.command("ACL", "SETUSER", "default", f"<{PASSWORD}")
        await after.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        with pytest.raises(StoreError):
            await Store(client(PASSWORD)).command("GET", "a")
        with pytest.raises(StoreError):
            await before.command("GET", "a")
        assert await after.command("GET", "a") == b"1"
        await before.close()
        await after.close()
        server.kill()
        server.wait()
