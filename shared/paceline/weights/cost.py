"""Predicted time of a broadcast: unicast, chains, trees, and trees over unequal links.

A snapshot of `num_bytes` is sent in chunks; each hop adds `start_s` per chunk to the transfer time.
The closed forms are those of Laminar (arXiv 2510.12633, appendix D), with a hop for each receiver.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paceline.errors import InvalidError

MIN_CHUNK_BYTES = 256 << 10
MAX_CHUNK_BYTES = 8 << 20
_GRAIN = 64 << 10  # chunk sizes are multiples of this, so that no item of any dtype is split


class Hop(NamedTuple):
    """One edge of a tree, with the rate at which its receiver gets data."""

    bytes_per_s: float
    latency_s: float = 0.0


class Codec(NamedTuple):
    """Speed of encoding and decoding deltas, in bytes of the snapshot, and their relative size."""

    ratio: float = 0.25  # bytes on the wire / bytes of the snapshot
    encode_bytes_per_s: float = 400e6
    decode_bytes_per_s: float = 400e6


def unicast_s(num_receivers: int, *, num_bytes: float, bytes_per_s: float) -> float:
    """Seconds for one uplink to send every receiver a copy."""
    return num_receivers * num_bytes / bytes_per_s


def chain_s(
    num_hops: int, num_chunks: float, *, num_bytes: float, bytes_per_s: float, start_s: float
) -> float:
    """Seconds until the last receiver of a chain has all chunks: (n + k - 1) (M / (k b) + tau)."""
    return (num_hops + num_chunks - 1) * (num_bytes / (num_chunks * bytes_per_s) + start_s)


def best_num_chunks(
    num_hops: int, *, num_bytes: float, bytes_per_s: float, start_s: float
) -> float:
    """Number of chunks that minimises `chain_s`, sqrt((n - 1) M / (b tau)); at least 1.

    Raises:
        InvalidError: `start_s` or `bytes_per_s` is not positive.
    """
    for name, value in (("start_s", start_s), ("bytes_per_s", bytes_per_s)):
        if value <= 0:
            raise InvalidError(f"{name} is {value}: it must be more than 0")
    return max(1.0, math.sqrt((num_hops - 1) * num_bytes / (bytes_per_s * start_s)))


def best_chain_s(num_hops: int, *, num_bytes: float, bytes_per_s: float, start_s: float) -> float:
    """`chain_s` with the optimal number of chunks."""
    size = {"num_bytes": num_bytes, "bytes_per_s": bytes_per_s, "start_s": start_s}
    return chain_s(num_hops, best_num_chunks(num_hops, **size), **size)


def tree_depth(num_receivers: int, fanout: int) -> int:
    """Depth of a full tree with this fan-out and number of receivers."""
    depth, level, held = 0, 1, 0
    while held < num_receivers:
        depth, level = depth + 1, level * fanout
        held += level
    return depth


def tree_s(
    depth: int,
    num_chunks: float,
    *,
    fanout: int,
    num_bytes: float,
    bytes_per_s: float,
    start_s: float,
) -> float:
    """Seconds of a tree whose inner nodes send `fanout` copies: (D + k - 1) (f M / (k b) + tau)."""
    shared = {"num_bytes": fanout * num_bytes, "bytes_per_s": bytes_per_s, "start_s": start_s}
    return chain_s(depth, num_chunks, **shared)


def path_s(hops: Sequence[Hop], *, chunk_bytes: float, num_chunks: int) -> float:
    """Seconds until the end of a path over unequal links has all chunks.

    sum_e (c / b_e + tau_e) + (k - 1) max_e (c / b_e), with b_e the share of the sender's uplink.
    """
    once = [chunk_bytes / hop.bytes_per_s for hop in hops]
    return sum(once) + sum(hop.latency_s for hop in hops) + (num_chunks - 1) * max(once, default=0)


def shares(capacity: float, caps: Sequence[float]) -> list[float]:
    """Max-min fair rates of flows with `caps` that share an uplink of `capacity`."""
    rates = [0.0] * len(caps)
    left, open_flows = capacity, len(caps)
    for i in sorted(range(len(caps)), key=lambda i: caps[i]):
        rates[i] = min(caps[i], left / open_flows)
        left, open_flows = left - rates[i], open_flows - 1
    return rates


def chunk_bytes(num_bytes: int, num_hops: int, *, bytes_per_s: float, start_s: float) -> int:
    """Chunk size that minimises the time of a chain of `num_hops`, 256 KiB to 8 MiB."""
    num_chunks = best_num_chunks(
        max(num_hops, 2), num_bytes=num_bytes, bytes_per_s=bytes_per_s, start_s=start_s
    )
    wanted = int(num_bytes / num_chunks) // _GRAIN * _GRAIN
    return min(max(wanted, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)


def delta_pays(bytes_per_s: float, codec: Codec) -> bool:
    """Whether deltas are faster than full chunks over links of this rate.

    Encoding, sending and decoding are pipelined, so the slowest of the three is the limit.
    """
    rates = (bytes_per_s / codec.ratio, codec.encode_bytes_per_s, codec.decode_bytes_per_s)
    return min(rates) > bytes_per_s
