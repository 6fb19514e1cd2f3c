"""The options of the commands of administrators."""

from __future__ import annotations

from typing import Any

from paceline.front.cli.job_commands import AddGateway
from paceline.front.cli.observing import Command


def add(commands: Any, command: Command, add_gateway: AddGateway) -> None:
    """Add `tokens`, `audit-log` and `tenants`."""
    _access(commands, command, add_gateway)
    _tenants(commands, command, add_gateway)


def _access(commands: Any, command: Command, add_gateway: AddGateway) -> None:
    tokens = commands.add_parser("tokens", help="create, list and revoke API tokens")
    verbs = tokens.add_subparsers(title="commands", metavar="COMMAND", required=True)
    create = command(
        verbs, "create", "administration.access:create", "create a token and print it, once"
    )
    create.add_argument("name", metavar="NAME", help="owner, as shown in lists and the audit log")
    create.add_argument(
        "--role", default="submit", choices=("read", "submit", "admin"), help="default: submit"
    )
    create.add_argument("--tenant", default="", help="default: your own; '*': all tenants")
    create.add_argument(
        "--days", type=float, default=None, help="days until it expires; default: never"
    )
    create.add_argument(
        "--no-code", action="store_true", help="jobs that it submits may bring no code"
    )
    listing = command(verbs, "list", "administration.access:list_tokens", "list tokens")
    revoke = command(verbs, "revoke", "administration.access:revoke", "revoke a token")
    revoke.add_argument("token", metavar="ID")
    audit = command(
        commands,
        "audit-log",
        "administration.access:audit_log",
        "show the audit log: who changed what",
    )
    audit.add_argument(
        "-n", "--lines", type=int, default=50, help="number of newest entries (default: 50)"
    )
    audit.add_argument(
        "--action", default="", help="e.g. job.submit, or job. for all actions on jobs"
    )
    audit.add_argument("--json", action="store_true", help="print one JSON object per line")
    for parser in (listing, audit):
        parser.add_argument("--tenant", default="", help="only this tenant")
    for parser in (create, listing, revoke, audit):
        add_gateway(parser)


def _tenants(commands: Any, command: Command, add_gateway: AddGateway) -> None:
    tenants = commands.add_parser("tenants", help="show and set quotas of tenants")
    verbs = tenants.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = command(verbs, "list", "administration.tenants:show", "list quotas and usage")
    listing.add_argument("--tenant", default="", help="only this tenant")
    change = command(
        verbs, "set", "administration.tenants:change", "set limits; others stay unchanged"
    )
    counts = {
        "submitted": "unfinished jobs",
        "jobs": "concurrently running jobs",
        "rollout-workers": "rollout workers over all jobs",
        "episodes": "episodes in flight over all jobs",
        "stored-bytes": "size of the trajectories of all live jobs in the store",
    }
    for name, what in counts.items():
        change.add_argument(f"--{name}", metavar="N", help=f"{what}; none: unlimited")
    sizes = {
        "spec": "a job file",
        "model-files": "the small files of a job's model",
        "code": "the packed code of a job",
        "uploaded": "all code that is uploaded within a week",
        "task": "a task",
        "trajectory": "an episode",
        "metrics": "the metrics of one trainer step",
    }
    for name, what in sizes.items():
        change.add_argument(f"--{name}-bytes", metavar="N", help=f"maximum size of {what}")
    change.add_argument(
        "--weight", metavar="X", help="share of contended capacity, relative to other tenants"
    )
    reset = command(
        verbs,
        "reset",
        "administration.tenants:reset",
        "reset the quota to the installation's default",
    )
    for parser in (change, reset):
        parser.add_argument("tenant", metavar="NAME")
    for parser in (listing, change, reset):
        add_gateway(parser)
