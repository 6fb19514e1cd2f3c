"""Processes: calls, CPU, memory, files, restarts."""

from frame import Panels, Query, Size, board, graph, grid, heading
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.choices import SERVICE, rate

OURS = '{app="paceline", service=~"$service"}'


def processes() -> Dashboard:
    """Calls and resource usage of each process."""
    return board(
        "processes",
        "Processes",
        "Calls between services, and resource usage of each process.",
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
            "Calls answered per second, by service and outcome.",
            Query(f"sum by (service, outcome) ({count})", "{{service}} {{outcome}}"),
            unit=units.CountsPerSecond,
            size=Size(8, 8),
        ),
        graph(
            "Duration of a call",
            "Mean seconds by method, for the ten methods with the largest total.",
            Query(f"topk(10, sum by (method) ({took}) / sum by (method) ({count}))", "{{method}}"),
            unit=units.Seconds,
            size=Size(8, 8),
        ),
        graph(
            "Handling",
            "Share of time with at least one call in progress.",
            Query(
                "max by (service) (rate(paceline_handling_seconds_total[$__rate_interval]))",
                "{{service}}",
            ),
            unit=units.PercentUnit,
            size=Size(8, 8),
            max_value=1,
        ),
    ]


def _refused() -> Panels:
    return [
        heading("Refused and failed"),
        graph(
            "Refused calls",
            "Calls per second whose certificate does not allow the method.",
            Query(
                f"sum by (service, caller) ({rate('paceline_refused_calls_total', OURS)})",
                "{{service}} refuses {{caller}}",
            ),
            unit=units.CountsPerSecond,
        ),
        graph(
            "Spans",
            "Trace spans per second by outcome; only sent ones reach the collector.",
            Query(
                f"sum by (service, outcome) ({rate('paceline_spans_total', OURS)})",
                "{{service}} {{outcome}}",
            ),
            unit=units.CountsPerSecond,
        ),
        graph(
            "Trackers",
            "Lag of experiment trackers behind their jobs.",
            Query("max by (tracker) (paceline_tracking_lag_seconds)", "{{tracker}}"),
            unit=units.Seconds,
            steps=((None, "green"), (600, "red")),
        ),
        graph(
            "Tracker failures",
            "In the last 15 minutes. They do not affect training.",
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
            "CPU",
            "Cores in use, by process.",
            Query(
                f"sum by (service, instance) ({rate('process_cpu_seconds_total', OURS)})",
                "{{service}} {{instance}}",
            ),
            size=Size(8, 8),
        ),
        graph(
            "Memory",
            "Resident memory by process; for accelerators see the dashboard Trainer.",
            Query(
                f"sum by (service, instance) (process_resident_memory_bytes{OURS})",
                "{{service}} {{instance}}",
            ),
            unit=units.BytesIEC,
            size=Size(8, 8),
        ),
        graph(
            "Files",
            "Open files and sockets, as a share of the limit.",
            Query(
                f"max by (service, instance) (process_open_fds{OURS} / process_max_fds{OURS})",
                "{{service}} {{instance}}",
            ),
            unit=units.PercentUnit,
            size=Size(8, 8),
            steps=((None, "green"), (0.8, "red")),
            max_value=1,
        ),
        graph(
            "Stalled",
            "Share of time in which a runnable process did not run.",
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
            "Processes that exited and were restarted in the last 15 minutes.",
            Query("sum by (service) (increase(paceline_restarts_total[15m]))", "{{service}}"),
            size=Size(8, 8),
        ),
        grid(
            "Processes",
            "Running processes and their versions.",
            Query(f"paceline_build_info{OURS}"),
            unit=units.Short,
            size=Size(8, 8),
        ),
    ]
