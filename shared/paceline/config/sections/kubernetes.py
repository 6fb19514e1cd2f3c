"""How the controller runs jobs in a cluster."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from paceline.plugins import StrictModel

ACCELERATORS = (
    *("nvidia.com/gpu*", "nvidia.com/mig-*", "amd.com/gpu*", "gpu.intel.com/*", "habana.ai/gaudi*"),
    *("google.com/tpu", "aws.amazon.com/neuron*", "huawei.com/Ascend*"),
)


class KueueOptions(StrictModel):
    """Queues of Kueue, which admit the pods of jobs once their quota has room for all of them."""

    queue: str = Field(default="", max_length=253)
    """The LocalQueue of all jobs; none if empty, and pods wait for machines instead."""
    tenants: dict[str, str] = Field(default_factory=dict[str, str])
    """LocalQueues of tenants that have another one, by tenant."""


class KubernetesOptions(StrictModel):
    """How the controller runs jobs in Kubernetes."""

    kubeconfig: Path | None = None
    """kubeconfig file for the API; the in-cluster configuration if null."""
    namespace: str = "default"
    release: str = "paceline"
    """Label `app.kubernetes.io/instance` of all objects of this installation."""
    identity: str = "paceline-controller-0"
    """Identity of this process in leader election."""
    owner: str = "paceline-controller"
    """Deployment that owns the objects of jobs."""
    lease: str = "paceline-controller"
    """Lease object that the leader holds."""
    lease_s: float = Field(default=15.0, gt=0)
    """How long it is valid without renewal; its holder stops acting after two thirds of that."""
    templates: Path = Path("/etc/paceline/templates")
    """Folder with complete pod templates: `trainer.yaml` and `rollout-<pool>.yaml`."""
    pools: dict[str, str] = Field(default_factory=dict)
    """Deployments of the shared pools, by kind of service."""
    ranks_per_pod: int = Field(default=8, ge=1)
    """Trainer ranks per pod; a larger job has several pods."""
    accelerators: tuple[str, ...] = ACCELERATORS
    """Patterns of extended resources that are accelerators; pods ask for as many as they need."""
    kueue: KueueOptions = KueueOptions()
    jobset: bool = False
    network_policies: bool = False
    """Whether each trainer gets a NetworkPolicy that lets its pods reach each other."""
    training_jobs: bool = True
    """Whether jobs may be submitted as `TrainingJob` objects."""
    gateway: str = ""
    """host:port of the gateway's gRPC, where `TrainingJob` objects are submitted."""
    pending_timeout_s: float = Field(default=3600.0, gt=0)
    """How long pods may wait for machines or images before their job fails."""
