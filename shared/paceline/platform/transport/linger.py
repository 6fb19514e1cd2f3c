"""How long a message waits for more items, as `linger.ms` of Kafka's producer.

With few open requests there is little to collect, and their latency counts; with many, nobody
notices some tens of milliseconds.
"""

from collections.abc import Callable

Linger = Callable[[], float]
_PER_OPEN_S = 0.0002
_MOST_S = 0.05


def at_once() -> float:
    """No time at all."""
    return 0.0


def linger_s(num_open: int) -> float:
    """Seconds to wait for more items when so many requests are open."""
    return min(num_open * _PER_OPEN_S, _MOST_S)
