"""The Redis keys of one job, in the order in which every script expects them."""

from __future__ import annotations

_SCRIPT_KEYS = (
    "counts",  # hash: episodes by state, drops by reason, groups, totals
    "meta",  # hash: step, incarnation, stop, sampler, eval run, ...
    "groups",  # hash: group -> record (JSON); groups leave when durable or dropped
    "batches",  # hash: step -> fixed batch (JSON); until durable
    "versions",  # hash: version -> publication (JSON)
    "results",  # hash: finished episode -> summary (JSON); they leave with their group
    "progress",  # hash: open episode -> its progress
    "ring",  # sorted set: trained trajectories, newest last
    "metrics",  # list: rows of the history (JSON)
    "advantages",  # hash: step -> advantages of its batch; until durable
    "memory",  # hash: plug-in/key -> what plug-ins remember (JSON)
    "outcomes",  # hash: group -> outcome (JSON), decided since the last batch was fixed
    "replay",  # hash: draw/index -> stored episode (JSON), whose payload is kept
    "epoch",  # a random number, drawn anew by each owner of the job
)


def job_key(tenant: str, job_id: str, name: str) -> str:
    """`{tenant/job}:name`: the hash tag keeps all keys of a job on one cluster node."""
    return f"{{{tenant}/{job_id}}}:{name}"


class JobKeys:
    """Names of all keys of a job."""

    def __init__(self, tenant: str, job_id: str) -> None:
        self.scripts = [job_key(tenant, job_id, name) for name in _SCRIPT_KEYS]
        (
            self.counts,
            self.meta,
            self.groups,
            self.batches,
            self.versions,
            self.results,
            self.progress,
            self.ring,
            self.metrics,
            self.advantages,
            self.memory,
            self.outcomes,
            self.replay,
            self.epoch,
        ) = self.scripts
        self.eval_ring = job_key(tenant, job_id, "eval_ring")
        self.payloads = job_key(tenant, job_id, "payloads")
        self.samples = job_key(tenant, job_id, "samples")  # sorted set of payloads, by step
        self.notes = job_key(tenant, job_id, "notes")  # hash: payload -> note (JSON)


def all_keys(tenant: str, job_id: str) -> list[str]:
    """Every key of a job, its record first."""
    keys = JobKeys(tenant, job_id)
    others = [job_key(tenant, job_id, name) for name in ("record", "spec", "owner")]
    return [*others, *keys.scripts, keys.eval_ring, keys.payloads, keys.samples, keys.notes]
