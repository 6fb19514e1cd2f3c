"""The job file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field, field_validator, model_validator

from paceline.config.base import KIND_CHARS, Name, Options, PluginSpec
from paceline.config.evaluation import DAY_S, HOUR_S, MAX_STEPS, EvalSpec, Seed
from paceline.config.lifecycle.forks import ForkSpec
from paceline.config.lifecycle.stopping import NotifySpec, StopSpec
from paceline.config.objective import ObjectiveSpec, Slots
from paceline.config.recipes import MAX_RECIPES
from paceline.config.sections.checkpoints import CheckpointSpec
from paceline.config.sections.lora import LoraSpec
from paceline.config.sections.mismatch import MismatchSpec
from paceline.config.sections.model import ModelSpec
from paceline.config.sections.outside import outside_problem
from paceline.config.sections.rollout import Devices, RolloutSpec, Threads
from paceline.config.sections.samples import KeptSamplesSpec
from paceline.config.tracking import TrackingSpec
from paceline.config.uploads import CodeSpec, DataSpec
from paceline.plugins import MAX_STOP_CHARS, MAX_STOP_STRINGS, StrictModel

MAX_BATCH_EPISODES = 1 << 18
MAX_EVAL_EPISODES = 1 << 20
MAX_KEPT_EPISODES = 1 << 16
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


class TaskSpec(StrictModel):
    """Tasks and their environment."""

    environment: str = Field(max_length=KIND_CHARS)
    """Name of an environment plug-in, which provides the tasks and their world; or, for one in the
    job's own code, `module:attribute` of an `EnvironmentPlugin`."""
    options: Options = Field(default_factory=dict)
    """Options of the environment."""
    source: PluginSpec | None = None
    """Tasks of another installed environment, such as `dataset`, for the world of `environment`;
    its own tasks if null."""
    transform: PluginSpec | None = None
    """Changes the prompts that the policy is shown; those of the environment if null."""
    seed: Seed = 0
    """Seed of the order of tasks, and of all episodes."""
    epochs: Annotated[int, Field(gt=0, le=1_000_000)] | None = None
    """How often all tasks are drawn; without end if null."""
    step_timeout_s: float = Field(default=60.0, gt=0, le=DAY_S)
    """Timeout of a reset, a step or the `transform`; exceeding it is an infrastructure error."""
    load_timeout_s: float = Field(default=300.0, gt=0, le=DAY_S)
    """Timeout of loading an environment in a process of its own: imports and data that its modules
    read. Resets and steps wait for it, and `step_timeout_s` counts only afterwards."""
    episode_timeout_s: float = Field(default=3600.0, gt=0, le=7 * DAY_S)
    """Timeout of a whole episode, including the time it waits for the policy."""


class SamplingSpec(StrictModel):
    """How training episodes are sampled."""

    temperature: float = Field(default=1.0, gt=0.0, le=100.0)
    """Divides the logits before sampling."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample from the most likely tokens that have this probability together."""
    top_k: int = Field(default=0, ge=0, le=10_000_000)
    """Sample from this many most likely tokens; all if 0."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Sample from tokens with at least this share of the largest probability."""
    max_tokens: int = Field(default=256, gt=0, le=1 << 22)
    """Sampled tokens per turn."""
    max_context: int = Field(default=2048, gt=0, le=1 << 22)
    """Tokens of prompt and response together, over all turns."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)], ...] = Field(
        default=(), max_length=MAX_STOP_STRINGS
    )
    """Strings that end a turn."""
    on_truncation: Literal["score", "mask", "zero"] = "mask"
    """For an episode that ran out of tokens: score it as is, mask all its tokens, or reward 0."""
    topology: PluginSpec = PluginSpec(kind="linear")
    """Drives an episode from its first observation to its transcripts: who speaks when."""


class RewardSpec(PluginSpec):
    """One part of the reward."""

    name: str = Field(default="", max_length=KIND_CHARS)
    """Name of the part in metrics; `kind` if empty."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """The reward is the sum of the parts, each times its weight."""
    timeout_s: float = Field(default=5.0, gt=0, le=HOUR_S)
    """Timeout of one score; exceeding it is an infrastructure error, never a zero."""
    after: tuple[Annotated[str, Field(max_length=KIND_CHARS)], ...] = Field(
        default=(), max_length=32
    )
    """Parts, listed before this one, whose rewards it is given."""

    @property
    def part(self) -> str:
        """Name of this part."""
        return self.name or self.kind


def _duplicates(names: Sequence[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _distinct_parts(value: tuple[RewardSpec, ...]) -> tuple[RewardSpec, ...]:
    names = [part.part for part in value]
    duplicates = _duplicates(names)
    if duplicates:
        raise ValueError(f"two parts are named {duplicates[0]!r}; give each a distinct `name`")
    for index, part in enumerate(value):
        for unknown in sorted({*part.after} - {*names[:index]}):
            before = ", ".join(names[:index]) or "none"
            raise ValueError(
                f"{part.part!r} is after {unknown!r}, which is not listed before it; "
                f"listed before: {before}"
            )
    return value


RewardSection = Annotated[
    tuple[RewardSpec, ...],
    Field(min_length=1, max_length=32),
    AfterValidator(_distinct_parts),
]


class AdvantageSpec(PluginSpec):
    """The advantage estimator."""

    kind: str = Field(default="grpo", max_length=KIND_CHARS)
    """Name of the advantage estimator."""

    @model_validator(mode="before")
    @classmethod
    def _without_site(cls, value: Any) -> Any:
        # Job files with the full defaults of 0.1.0 name it; it is not an option of a plug-in.
        if isinstance(value, dict) and cast(dict[str, Any], value).get("site") == "experience":
            return {k: v for k, v in cast(dict[str, Any], value).items() if k != "site"}
        return cast(Any, value)


class ReplaySpec(PluginSpec):
    """Which episodes are stored and join later groups of their task, and how many are stored."""

    per_task: int = Field(default=8, gt=0, le=4096)
    """Episodes of a task, the newest."""
    pool_bytes: int = Field(default=64 << 20, gt=0, le=1 << 40)
    """Size of the whole pool; it counts in `payload_bytes`, of which it may take half."""


class ExperienceSpec(StrictModel):
    """Batches, staleness, filters, advantages."""

    batch_groups: int = Field(default=32, gt=0, le=65_536)
    """B: groups per trainer step."""
    group_size: int = Field(default=8, gt=0, le=4096)
    """G: episodes of one task. With an `allocator` what is expected until groups are seen."""
    max_staleness: int = Field(default=4, ge=0, le=1000)
    """S, in trainer steps; 0 is synchronous, and repeatable within limits (see ARCHITECTURE.md)."""
    mode: Literal["asynchronous", "april", "rollout_wise", "coupled"] = "asynchronous"
    """Order of leases (docs/generation.md). `april`: nothing from the moment that a batch is
    full until newer weights are served, and then unfinished episodes first. `rollout_wise`: slots
    are filled by single episodes, not by whole groups. `coupled`: a baseline, in which nothing is
    leased until all rollout workers have the newest weights."""
    straggler_timeout_s: float = Field(default=60.0, gt=0, le=DAY_S)
    """How long the trainer waits for stragglers at the bound before they are dropped as stale."""
    max_in_flight: Annotated[int, Field(gt=0, le=10_000_000)] | None = None
    """Episodes in flight at once; unlimited if null."""
    max_attempts: int = Field(default=5, gt=0, le=1000)
    """Leases of one episode until it is dropped."""
    lease_s: float = Field(default=10.0, gt=0, le=HOUR_S)
    """How long a worker keeps an episode without renewing its lease."""
    payload_bytes: int = Field(default=1 << 30, gt=0, le=1 << 40)
    """Budget for the job's payloads in the store."""
    keep_trajectories: int = Field(default=512, gt=0, le=MAX_KEPT_EPISODES)
    """Number of trajectories kept for `ListTrajectories`, the newest."""
    samples: KeptSamplesSpec = KeptSamplesSpec()
    """Samples that are kept of each step besides."""
    sampler: PluginSpec = PluginSpec(kind="shuffle")
    """Draws the tasks."""
    allocator: PluginSpec | None = None
    """Decides how many episodes each task gets; `group_size` if null."""
    replay: ReplaySpec | None = None
    """Stores episodes and adds them to later groups, before filters see these."""
    filters: tuple[PluginSpec, ...] = Field(
        default=(PluginSpec(kind="zero_variance"),), max_length=16
    )
    """Which groups, and which of their episodes, are trained on; called in this order."""
    advantage: AdvantageSpec = AdvantageSpec()
    """Estimates how much better than expected each episode was."""
    advantage_shaping: tuple[PluginSpec, ...] = Field(default=(), max_length=16)
    """Advantages that change those of `advantage`, in this order."""

    @model_validator(mode="after")
    def _pool_fits_its_budget(self) -> ExperienceSpec:
        replay, most = self.replay, self.payload_bytes // 2
        if replay is not None and replay.pool_bytes > most:
            raise ValueError(
                f"replay.pool_bytes: {replay.pool_bytes} with payload_bytes {self.payload_bytes}; "
                f"at most {most}, half of it"
            )
        return self


class OptimizerSpec(StrictModel):
    """AdamW with warm-up."""

    kind: Literal["adamw"] = "adamw"
    """The only one there is."""
    lr: float = Field(default=1e-6, gt=0.0, le=1000.0)
    """Learning rate after the warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay of the averages of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0.0, le=1.0)
    """Added to the denominator of an update."""
    weight_decay: float = Field(default=0.0, ge=0.0, le=1000.0)
    """Decoupled from the gradient."""
    max_grad_norm: float = Field(default=1.0, gt=0.0, le=1e9)
    """Gradients are scaled down to this norm."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up; `linear` and `cosine` reach 0 at `stop.steps`."""
    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps in which the learning rate grows to `lr`."""


class TrainerSpec(StrictModel):
    """Optimisation, checkpoints and publication."""

    objective: ObjectiveSpec = ObjectiveSpec()
    hooks: Slots = ()
    """Change the learning rate of single updates, or veto them."""
    lora: LoraSpec | None = None
    """All weights are trained if null."""
    optimizer: OptimizerSpec = OptimizerSpec()
    tokens_per_micro_batch: int = Field(default=4096, gt=0, le=1 << 26)
    """Tokens of one forward and backward pass; fewer need less memory."""
    mini_batches: int = Field(default=1, gt=0, le=4096)
    """Optimiser updates per batch."""
    world_size: int = Field(default=1, gt=0, le=4096)
    """Ranks that share model and batch, one for each GPU."""
    devices: Devices = "auto"
    """`auto`: a GPU for each rank, and the CPU on a machine without GPUs; `cpu`; or, on one
    machine, the GPUs of its ranks (`"0,1"`)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward and backward pass, `auto` as for the model; master weights are
    float32."""
    publish_every: int = Field(default=1, gt=0, le=1001)
    """Publish weights after every so many steps."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    mismatch: MismatchSpec = MismatchSpec()
    threads: Threads = "auto"
    """Threads of a rank that computes on a CPU."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time."""


class JobSpec(StrictModel):
    """A job as a user submits it; immutable once accepted."""

    name: Name
    """Lower-case letters, digits and hyphens; need not be unique."""
    kind: Literal["train", "eval"] = "train"
    """`eval`: nothing is trained. The weights of `model`, those of the checkpoint that `fork`
    names, or what answers at `model.endpoint` is measured by `eval` and `evals`, all episodes are
    kept, and the job is over."""
    tenant: Name = "default"
    """Owner of the job; tokens of a tenant submit for that tenant only."""
    recipe: tuple[Annotated[str, Field(max_length=KIND_CHARS)], ...] = Field(
        default=(), max_length=MAX_RECIPES
    )
    """Recipes whose values hold wherever the job has none of its own; one may be its name alone."""
    model: ModelSpec
    code: CodeSpec | None = None
    data: DataSpec | None = None
    tasks: TaskSpec
    eval: EvalSpec | None = EvalSpec()
    evals: dict[Name, EvalSpec] = Field(default_factory=dict[str, EvalSpec], max_length=16)
    """Further evaluations, by name, each with its own interval and tasks. If there are any, there
    is no `eval` unless the job has one; `stop.eval_reward` and the job's status are about `eval`,
    or else the first of these by name."""
    sampling: SamplingSpec = SamplingSpec()
    reward: RewardSection
    """Parts of the reward; at least one."""
    experience: ExperienceSpec = ExperienceSpec()
    rollout: RolloutSpec = RolloutSpec()
    trainer: TrainerSpec = TrainerSpec()
    stop: StopSpec = StopSpec()
    tracking: tuple[TrackingSpec, ...] = Field(default=(), max_length=8)
    """Experiment trackers that the metrics go to."""
    notify: NotifySpec | None = None
    """Who is told when the job has ended."""
    fork: ForkSpec | None = None
    """The job continues from a checkpoint of another one."""
    ttl_seconds_after_finished: float | None = Field(default=None, ge=0, le=3650 * DAY_S)
    """The job is deleted so long after its end, with its checkpoints; never if null."""

    @property
    def trains(self) -> bool:
        """Whether it trains the model; if not, it measures it once."""
        return self.kind == "train"

    @property
    def eval_sets(self) -> dict[str, EvalSpec]:
        """All evaluations in the order of their names; that of `eval` is the empty one.

        Not in that of the job file, which a Kubernetes API server does not keep.
        """
        named = dict(sorted(self.evals.items()))
        return named if self.eval is None else {"": self.eval, **named}

    @property
    def main_eval(self) -> str | None:
        """Name of the evaluation that the job's status is about; None: there is none."""
        return next(iter(self.eval_sets), None)

    @property
    def has_own_environment(self) -> bool:
        """Whether its tasks and their world are in the code that comes with it."""
        return self.code is not None and ":" in self.tasks.environment

    @property
    def lists_own_tasks(self) -> bool:
        """Whether the code that comes with it lists its tasks."""
        return self.has_own_environment and self.tasks.source is None

    @field_validator("recipe", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _named_evals_alone(cls, value: Any) -> Any:
        """Without a say on `eval`, named ones replace its default."""
        if not isinstance(value, dict) or not cast(dict[str, Any], value).get("evals"):
            return cast(Any, value)
        return {"eval": None, **cast(dict[str, Any], value)}

    @field_validator("tracking")
    @classmethod
    def _distinct_trackers(cls, value: tuple[TrackingSpec, ...]) -> tuple[TrackingSpec, ...]:
        labels = [tracker.label for tracker in value]
        duplicates = _duplicates(labels)
        if duplicates:
            raise ValueError(
                f"two trackers are named {duplicates[0]!r}; give each a distinct `name`"
            )
        return value

    @model_validator(mode="after")
    def _starts_within_its_bounds(self) -> JobSpec:
        bounds, replicas = self.rollout.scaling, self.rollout.replicas
        if bounds and not bounds.min_replicas <= replicas <= bounds.max_replicas:
            raise ValueError(
                f"rollout.replicas: {replicas} is not within rollout.scaling, "
                f"{bounds.min_replicas} to {bounds.max_replicas}"
            )
        return self

    @model_validator(mode="after")
    def _sources_of_evals_change_one(self) -> JobSpec:
        for name, evaluation in self.eval_sets.items():
            if evaluation.source and self.tasks.source is None:
                field = f"evals.{name}.source" if name else "eval.source"
                raise ValueError(f"{field}: changes options of tasks.source, which is missing")
        return self

    @model_validator(mode="after")
    def _not_too_many_evals(self) -> JobSpec:
        episodes = sum(e.tasks * e.samples for e in self.eval_sets.values())
        most = MAX_EVAL_EPISODES if self.trains else MAX_KEPT_EPISODES
        if episodes > most:
            raise ValueError(
                f"evals: tasks times samples are {episodes} episodes over all evaluations; at most "
                f"{most} are allowed in a job of kind {self.kind}"
            )
        if not (self.trains or episodes):
            raise ValueError("eval: a job of kind eval needs it, or one of `evals`")
        return self

    @model_validator(mode="after")
    def _endpoint_is_only_measured(self) -> JobSpec:
        sets = self.eval_sets.items()
        evals = {f"evals.{n}.options" if n else "eval.options": e.options for n, e in sets}
        problem = outside_problem(
            self.model,
            kind=self.kind,
            is_fork=self.fork is not None,
            is_scaled=self.rollout.scaling is not None,
            options={"tasks.options": self.tasks.options, **evals},
        )
        if problem:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> JobSpec:
        best = self.trainer.checkpoint.best
        if best and (problem := best.problem(self.eval_sets, self.main_eval)):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _mode_fits_staleness(self) -> JobSpec:
        mode, bound = self.experience.mode, self.experience.max_staleness
        if mode == "april" and bound == 0:
            raise ValueError(
                "experience.max_staleness: 0 with experience.mode april, whose episodes are "
                "continued with newer weights; at least 1 is needed"
            )
        if mode == "coupled" and bound > 0:
            raise ValueError(
                f"experience.max_staleness: {bound} with experience.mode coupled; 0 is needed"
            )
        return self

    @model_validator(mode="after")
    def _stops_on_known_evaluations(self) -> JobSpec:
        if problem := self.stop.unknown(dict(self.eval_sets)):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _sizes_fit_each_other(self) -> JobSpec:
        size = self.experience.group_size
        episodes = self.experience.batch_groups * size
        if episodes > MAX_BATCH_EPISODES:
            raise ValueError(
                f"experience.batch_groups: {self.experience.batch_groups} groups of "
                f"experience.group_size {size} are {episodes} episodes in a batch; at most "
                f"{MAX_BATCH_EPISODES} are allowed"
            )
        bound = self.experience.max_staleness
        if self.trainer.publish_every > bound + 1:
            raise ValueError(
                f"trainer.publish_every: {self.trainer.publish_every} with "
                f"experience.max_staleness {bound}; at most {bound + 1}, or episodes get too old "
                "before newer weights are published"
            )
        if self.sampling.max_tokens >= self.sampling.max_context:
            raise ValueError(
                f"sampling.max_tokens: {self.sampling.max_tokens} leaves no room for a prompt "
                f"in max_context {self.sampling.max_context}; lower one or raise the other"
            )
        return self
