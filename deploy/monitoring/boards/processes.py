"""The processes themselves: calls, processor, memory, files, restarts."""

from frame import Panels, Query, Size, board, graph, grid, heading
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import SERVICE, rate

OURS = '{app="paceline", service=~"$service"}'


def processes() -> Dashboard:
    """For whoever looks into one process."""
    return board(
        "processes",
        "Processes",
        "Calls between services, and what each process takes of its machine.",
        [*_calls(), *_refused(), *_machine()],
        variables=[SERVICE],
    )


def _calls() -> Panels:
    count = f"rate(paceline_rpcs_total{OURS}[$__rate_interval])"
    took = f"rate(paceline_rpc_seconds_total{OURS}[$__rate_interval])"
    return [
        heading("Calls"),
        graph(
            "Calls",
            "Answered per second, by service and outcome.",
            Query(f"sum by (service, outcome) ({count})", "{{service}} {{outcome}}"),
            unit=units.CountsPerSecond,
            size=Size(8, 8),
        ),
        graph(
            "Time of a call",
            "Mean seconds by method, of the ten that take longest in all.",
            Query(f"topk(10, sum by (method) ({took}) / sum by (method) ({count}))", "{{method}}"),
            unit=units.Seconds,
            size=Size(8, 8),
        ),
        graph(
            "Handling",
            "Share of time with at least one call at hand.",
            Query(
                "max by (service) (rate(paceline_handling_seconds_total[$__rate_interval]))",
                "{{service}}",
            ),
            unit=units.PercentUnit,
            size=Size(8, 8),
            most=1,
        ),
    ]


def _refused() -> Panels:
    return [
        heading("Refused and lost"),
        graph(
            "Refused calls",
            "Per second: callers whose certificate does not allow what they ask for.",
            Query(
                f"sum by (service, caller) ({rate('paceline_refused_calls_total', OURS)})",
                "{{service}} refuses {{caller}}",
            ),
            unit=units.CountsPerSecond,
        ),
        graph(
            "Spans",
            "Of traces, per second; only sent ones reach the collector.",
            Query(
                f"sum by (service, outcome) ({rate('paceline_spans_total', OURS)})",
                "{{service}} {{outcome}}",
            ),
            unit=units.CountsPerSecond,
        ),
        graph(
            "Trackers",
            "How far experiment trackers are behind the jobs that they follow.",
            Query("max by (tracker) (paceline_tracking_lag_seconds)", "{{tracker}}"),
            unit=units.Seconds,
            steps=((None, "green"), (600, "red")),
        ),
        graph(
            "Failures of trackers",
            "In the last 15 minutes. They cost training nothing.",
            Query(
                "sum by (tracker, reason) (increase(paceline_tracking_errors_total[15m]))",
                "{{tracker}} {{reason}}",
            ),
        ),
    ]


def _machine() -> Panels:
    return [
        heading("Machine"),
        graph(
            "Processor",
            "Cores in use, by process.",
            Query(
                f"sum by (service, instance) ({rate('process_cpu_seconds_total', OURS)})",
                "{{service}} {{instance}}",
            ),
            size=Size(8, 8),
        ),
        graph(
            "Memory",
            "Resident, by process; of accelerators see Trainer.",
            Query(
                f"sum by (service, instance) (process_resident_memory_bytes{OURS})",
                "{{service}} {{instance}}",
            ),
            unit=units.BytesIEC,
            size=Size(8, 8),
        ),
        graph(
            "Files",
            "Open files and sockets by how many there may be.",
            Query(
                f"max by (service, instance) (process_open_fds{OURS} / process_max_fds{OURS})",
                "{{service}} {{instance}}",
            ),
            unit=units.PercentUnit,
            size=Size(8, 8),
            steps=((None, "green"), (0.8, "red")),
            most=1,
        ),
        graph(
            "Stalled",
            "Share of time in which a process did not run though it should have.",
            Query(
                f"max by (service, instance) ({rate('paceline_stalled_seconds_total', OURS)})",
                "{{service}} {{instance}}",
            ),
            unit=units.PercentUnit,
            size=Size(8, 8),
            steps=((None, "green"), (0.3, "red")),
        ),
        graph(
            "Restarts",
            "Processes that ended and were started again, in the last 15 minutes.",
            Query("sum by (service) (increase(paceline_restarts_total[15m]))", "{{service}}"),
            size=Size(8, 8),
        ),
        grid(
            "Processes",
            "Those that run, and their versions.",
            Query(f"paceline_build_info{OURS}"),
            unit=units.Short,
            size=Size(8, 8),
        ),
    ]
