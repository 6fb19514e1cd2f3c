"""The relay of benchmarks/faults.py holds what goes through it, and resets connections."""

import random
import socket
import threading
from collections.abc import Iterator

import pytest
from chaos.relay import Relay

from paceline_harness.patience import PATIENCE_S


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that says back what it hears, to one caller after another."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            with line:
                while data := line.recv(100):
                    line.sendall(data)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(PATIENCE_S)


@pytest.fixture
def relay(echo: int) -> Iterator[Relay]:
    made = Relay(lambda: echo)
    yield made
    made.close()


def call(relay: Relay) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", relay.port), timeout=PATIENCE_S)
    line.sendall(b"one")
    assert line.recv(100) == b"one"
    return line


def test_what_is_held_comes_when_it_is_released(relay: Relay) -> None:
    with call(relay) as line:
        relay.hold()
        line.sendall(b"two")
        line.settimeout(0.2)
        with pytest.raises(TimeoutError):
            line.recv(100)
        line.settimeout(PATIENCE_S)
        relay.release()
        assert line.recv(100) == b"two"


def test_a_reset_breaks_the_connection_and_the_next_one_works(relay: Relay) -> None:
    with call(relay) as line:
        relay.reset(1.0, random.Random(0))
        with pytest.raises(ConnectionResetError):
            line.recv(100)
    call(relay).close()
