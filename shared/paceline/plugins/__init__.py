"""The plug-in protocols, by kind, and the registry that finds plug-ins by name.

Two kinds of types are defined elsewhere: those that services share (`Task`, `Transcript`, `Score`,
`SamplingParams`) are in `paceline.types`, and the input of objectives, which needs torch, is in
`paceline.methods.parts.batch`.

Decisions: docs/decisions/plugins.md.
"""

from paceline.plugins.declared import Declared, RegularExpression, declared, declares
from paceline.plugins.descriptors import Method, Plugin, Plugins
from paceline.plugins.endpoints import Endpoints
from paceline.plugins.engines import (
    Engine,
    EngineFactory,
    EngineOutput,
    EngineRequest,
    EngineStatus,
    HeaderSpec,
    NameKind,
    ProvesWeights,
    RollsBack,
    TensorSpec,
    WeightSnapshot,
)
from paceline.plugins.environments import (
    Environment,
    EnvironmentPlugin,
    FindsTasks,
    Message,
    Observation,
    Replies,
    StepResult,
    TaskSource,
)
from paceline.plugins.episodes import (
    Advantages,
    Context,
    EpisodeBatch,
    GroupOutcome,
    Turns,
)
from paceline.plugins.generation import (
    MAX_CURSOR_BYTES,
    MAX_NAMED_TASKS,
    MAX_PICK_BYTES,
    MAX_STARTS_BYTES,
    MAX_WAVE,
    MAX_WAVES,
    Allocator,
    ClosesEarly,
    FinishedEpisode,
    FinishedTurn,
    Learns,
    Limits,
    OpenGroup,
    Pick,
    Sampler,
    Start,
)
from paceline.plugins.groups import (
    Advantage,
    Drop,
    Filter,
    FinishedGroup,
    Keep,
    Repair,
)
from paceline.plugins.model import StrictModel
from paceline.plugins.programs import (
    ProgramEnding,
    ProgramLimits,
    ProgramOutcome,
    Programs,
)
from paceline.plugins.replay import MAX_GUESTS, Guest, Replay, Stored
from paceline.plugins.requests import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    EngineLimits,
    error_output,
    request_problem,
)
from paceline.plugins.rewards import Reward, RewardInput, RewardTurn
from paceline.plugins.topologies import Session, Topology
from paceline.plugins.trackers import TrackedPoint, TrackedRun, TrackedSample, Tracker
from paceline.plugins.transforms import Transform, TransformContext, Variant

__all__ = [
    "MAX_CURSOR_BYTES",
    "MAX_GUESTS",
    "MAX_NAMED_TASKS",
    "MAX_PICK_BYTES",
    "MAX_STARTS_BYTES",
    "MAX_STOP_CHARS",
    "MAX_STOP_STRINGS",
    "MAX_STOP_TOKENS",
    "MAX_WAVE",
    "MAX_WAVES",
    "Advantage",
    "Advantages",
    "Allocator",
    "ClosesEarly",
    "Context",
    "Declared",
    "Drop",
    "Endpoints",
    "Engine",
    "EngineFactory",
    "EngineLimits",
    "EngineOutput",
    "EngineRequest",
    "EngineStatus",
    "Environment",
    "EnvironmentPlugin",
    "EpisodeBatch",
    "Filter",
    "FindsTasks",
    "FinishedEpisode",
    "FinishedGroup",
    "FinishedTurn",
    "GroupOutcome",
    "Guest",
    "HeaderSpec",
    "Keep",
    "Learns",
    "Limits",
    "Message",
    "Method",
    "NameKind",
    "Observation",
    "OpenGroup",
    "Pick",
    "Plugin",
    "Plugins",
    "ProgramEnding",
    "ProgramLimits",
    "ProgramOutcome",
    "Programs",
    "ProvesWeights",
    "RegularExpression",
    "Repair",
    "Replay",
    "Replies",
    "Reward",
    "RewardInput",
    "RewardTurn",
    "RollsBack",
    "Sampler",
    "Session",
    "Start",
    "StepResult",
    "Stored",
    "StrictModel",
    "TaskSource",
    "TensorSpec",
    "Topology",
    "TrackedPoint",
    "TrackedRun",
    "TrackedSample",
    "Tracker",
    "Transform",
    "TransformContext",
    "Turns",
    "Variant",
    "WeightSnapshot",
    "declared",
    "declares",
    "error_output",
    "request_problem",
]
