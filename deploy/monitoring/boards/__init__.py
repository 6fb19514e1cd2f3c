"""One module per dashboard; `ALL` lists those that are generated."""

from collections.abc import Callable

from grafana_foundation_sdk.models.dashboard import Dashboard

from boards.cost import cost
from boards.environment import environment
from boards.ledger import ledger
from boards.overview import overview
from boards.processes import processes
from boards.reward import reward
from boards.rollout import rollout
from boards.tenants import tenants
from boards.trainer import trainer
from boards.utilisation import utilisation
from boards.weights import weights

ALL: tuple[Callable[[], Dashboard], ...] = (
    overview,
    utilisation,
    rollout,
    environment,
    reward,
    trainer,
    weights,
    ledger,
    cost,
    tenants,
    processes,
)
