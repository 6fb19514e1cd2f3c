"""`paceline weights`: the broadcast of a job's weights."""

from __future__ import annotations

from argparse import Namespace

from paceline.front.api.documents import WeightsView
from paceline.front.cli.entry import Exit
from paceline.front.cli.target.clients import reader_of
from paceline.front.cli.terminal.console import SafeConsole
from paceline.front.cli.terminal.tables import Column, FittingTable
from paceline.weights.placement import PublishedVersion, WeightHolder
from paceline.weights.route import TransferProgress

MIB = 1 << 20


def show(arguments: Namespace) -> int:
    """`paceline weights ID`."""
    with reader_of(arguments) as client:
        weights = client.list_weights(arguments.job)
    console = SafeConsole()
    if not weights.versions:
        console.print("no weights are published")
        return Exit.OK
    console.print(versions_of(weights), holders_of(weights), sep="\n")
    return Exit.OK


def versions_of(weights: WeightsView) -> FittingTable:
    """One row per version."""
    table = FittingTable(
        *("version", "step", "MiB", Column("chunk MiB", 3), Column("route", 1)),
        *(Column("expected s", 2), "sent"),
    )
    for published in weights.versions:
        table.add_row(*_version(published))
    return table


def holders_of(weights: WeightsView) -> FittingTable:
    """One row per seed and worker, with its progress on the newest version that it holds."""
    table = FittingTable(
        *("worker", Column("site", 4), "active", "has", "chunks"),
        *(Column("from", 3, is_long=True), Column("MB/s", 2), Column("trouble", 1, is_long=True)),
    )
    for holder in weights.holders:
        table.add_row(*_holder(holder))
    return table


def _version(published: PublishedVersion) -> tuple[str, ...]:
    version = published.version
    return (
        str(version.version),
        str(version.step),
        f"{version.num_bytes / MIB:.1f}",
        f"{published.chunk_bytes / MIB:g}",
        published.shape or "",
        f"{published.predicted_s:.2f}" if published.predicted_s else "",
        f"{published.ratio:.0%}" if published.ratio else "",
    )


def _holder(holder: WeightHolder) -> tuple[str, ...]:
    newest = max(holder.transfers, key=_number, default=None)
    sources = (newest.sources if newest is not None else ()) or [s.endpoint for s in holder.sources]
    return (
        holder.worker_id or f"seed {holder.endpoint}",
        holder.site,
        str(holder.active_version) if holder.active_version >= 0 else "",
        str(newest.version) if newest is not None else "",
        f"{newest.num_ready}/{newest.num_chunks}" if newest is not None else "",
        " ".join(sources),
        f"{holder.bytes_per_s / 1e6:.1f}" if holder.bytes_per_s else "",
        holder.trouble,
    )


def _number(transfer: TransferProgress) -> int:
    return transfer.version
