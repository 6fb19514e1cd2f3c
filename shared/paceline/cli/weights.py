"""`paceline weights`: the broadcast of a job's weights."""

from __future__ import annotations

from argparse import Namespace

from paceline.api.documents import WeightsView
from paceline.cli.entry import Exit
from paceline.cli.target.clients import reader_of
from paceline.cli.terminal.console import SafeConsole
from paceline.cli.terminal.tables import Column, FittingTable
from paceline.weights.placement import PublishedVersion, WeightHolder
from paceline.weights.route import TransferProgress

MIB = 1 << 20


def show(arguments: Namespace) -> int:
    """`paceline weights ID`."""
    with reader_of(arguments) as client:
        found = client.list_weights(arguments.job)
    console = SafeConsole()
    if not found.versions:
        console.print("no weights are published")
        return Exit.OK
    console.print(versions_of(found), holders_of(found), sep="\n")
    return Exit.OK


def versions_of(found: WeightsView) -> FittingTable:
    """One row per version."""
    table = FittingTable(
        *("version", "step", "MiB", Column("chunk MiB", 3), Column("route", 1)),
        *(Column("expected s", 2), "sent"),
    )
    for each in found.versions:
        table.add_row(*_version(each))
    return table


def holders_of(found: WeightsView) -> FittingTable:
    """One row per seed and worker, with its progress on the newest version that it holds."""
    table = FittingTable(
        *("worker", Column("site", 4), "active", "has", "chunks"),
        *(Column("from", 3, is_long=True), Column("MB/s", 2), Column("trouble", 1, is_long=True)),
    )
    for each in found.holders:
        table.add_row(*_holder(each))
    return table


def _version(each: PublishedVersion) -> tuple[str, ...]:
    version = each.version
    return (
        str(version.version),
        str(version.step),
        f"{version.num_bytes / MIB:.1f}",
        f"{each.chunk_bytes / MIB:g}",
        each.shape or "",
        f"{each.predicted_s:.2f}" if each.predicted_s else "",
        f"{each.ratio:.0%}" if each.ratio else "",
    )


def _holder(each: WeightHolder) -> tuple[str, ...]:
    newest = max(each.transfers, key=_number, default=None)
    sources = (newest.sources if newest is not None else ()) or [s.endpoint for s in each.sources]
    return (
        each.worker_id or f"seed {each.endpoint}",
        each.site,
        str(each.active_version) if each.active_version >= 0 else "",
        str(newest.version) if newest is not None else "",
        f"{newest.num_ready}/{newest.num_chunks}" if newest is not None else "",
        " ".join(sources),
        f"{each.bytes_per_s / 1e6:.1f}" if each.bytes_per_s else "",
        each.trouble,
    )


def _number(each: TransferProgress) -> int:
    return each.version
