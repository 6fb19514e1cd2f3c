"""What a job may name: plug-ins, its own code, and exactly what an operator has listed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import ServiceSettings, parse_job
from paceline.config.base import PluginSpec
from paceline.config.load import validate
from paceline.config.named import module_targets, patterns, problems
from paceline.config.objective import ObjectiveSpec
from paceline.config.plugins import PluginSettings
from paceline.errors import ConfigError, InvalidError, UnlistedError
from paceline.front.cli import entry
from paceline.methods.objective.load import load_objective
from paceline.plugins import registry
from paceline.plugins.allowed import AllowedTargets
from paceline.plugins.slot_options import slot_options
from paceline_harness.models.folders import write_readable_model
from paceline_reward.parts import read_parts

LISTED = AllowedTargets.of(["my_rewards:score", "json:dumps"])
EVIL = "import pathlib\npathlib.Path(__file__).with_name('imported').touch()\ndef f(): ...\n"
JOB: dict[str, Any] = {
    "name": "a",
    "model": {"path": "m"},
    "tasks": {"environment": "arithmetic"},
    "reward": ["exact"],
}
_LIKE = st.sampled_from([*sorted(LISTED.targets), "exact", "ppo_clip", "os:system", "a.b:c"])


def _edited(name: str, at: int, text: str, cut: int) -> str:
    return name[:at] + text + name[at + cut :]


_NEAR = st.builds(
    _edited,
    _LIKE,
    st.integers(0, 20),
    st.text(max_size=2) | st.sampled_from([".", ":", " ", "\n", "\u200b", "\uff1a", "__class__"]),
    st.integers(0, 2),
)
NAMES = _LIKE | _NEAR | st.text(max_size=12) | st.from_regex(r"[a-z.]{1,6}:[a-z._]{1,6}")


def spec_of(**changes: Any) -> Any:
    return parse_job(JOB | changes)


@given(NAMES, st.sampled_from(registry.KINDS), st.sampled_from([LISTED, AllowedTargets()]))
def test_nothing_else_is_ever_accepted(name: str, kind: str, allowed: AllowedTargets) -> None:
    is_listed = kind in registry.FROM_MODULES and name in allowed.targets
    if is_listed or name in registry.installed(kind):
        registry.check(kind, name, allowed=allowed)
        expected = name if is_listed else registry.installed(kind)[name].target
        assert registry.target(kind, name, allowed=allowed) == expected
    else:
        with pytest.raises(InvalidError):
            registry.check(kind, name, allowed=allowed)
        with pytest.raises(InvalidError):
            registry.find(kind, name, allowed=allowed)


@given(NAMES, st.booleans())
def test_a_reward_worker_calls_plug_ins_and_listed_functions_only(
    name: str, by_python: bool
) -> None:
    part = {"kind": "python", "function": name} if by_python else {"kind": name}
    installed = {plugin.target for plugin in registry.installed("rewards").values()}
    try:
        (read,) = read_parts(json.dumps([part]), allowed=LISTED)
    except InvalidError:
        return
    assert read.target in installed | LISTED.targets
    assert not by_python or read.target in LISTED.targets
    assert not read.is_own


@given(NAMES)
def test_a_set_of_targets_is_one_of_whole_identifiers(name: str) -> None:
    module, _, attribute = name.partition(":")
    parts = [*module.split("."), attribute]
    is_pair = name.isascii() and all(each.isidentifier() for each in parts)
    assert (name in AllowedTargets.of([name])) == is_pair
    if is_pair:
        assert PluginSettings(allowed=(name,)).targets == AllowedTargets.of([name])
    else:
        with pytest.raises(ConfigError):
            validate(PluginSettings, {"allowed": [name]})


@pytest.mark.parametrize(
    "text", ["my_rewards", "my_rewards:", "my_rewards:*", "a:b.c", "a:b ", "*"]
)
def test_an_operator_lists_no_modules(text: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed\.0"):
        validate(PluginSettings, {"allowed": [text]})


def test_no_list_is_an_empty_one() -> None:
    fields = {"kind": "reward", "worker_id": "r", "plugins": None}
    assert validate(ServiceSettings, fields).plugins.targets == AllowedTargets()


@pytest.mark.parametrize("kind", sorted(registry.FROM_MODULES))
def test_no_module_is_imported_unless_its_function_is_listed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("evil:f", "evil:g"):
        with pytest.raises(UnlistedError, match=f"'{name}' is not a function that jobs may name"):
            registry.find(kind, name, allowed=AllowedTargets.of(["evil:h", "other:f"]))
    assert not (tmp_path / "imported").exists()


SLOTS: list[dict[str, Any]] = [
    {"surrogate": "evil:f"},
    {"proximal": "evil:f"},
    {"aggregation": "evil:f"},
    {"shaping": ["evil:f"]},
    {"corrections": ["evil:f"]},
    {"regularisers": ["evil:f"]},
]


@pytest.mark.parametrize("objective", [*SLOTS, {}])
def test_a_trainer_imports_no_module_that_is_not_listed(
    objective: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)
    hooks = [] if objective else [PluginSpec(kind="evil:f")]
    with pytest.raises(UnlistedError, match="'evil:f' is not a function that jobs may name here"):
        load_objective(ObjectiveSpec.model_validate(objective), hooks)
    assert not (tmp_path / "imported").exists()


@pytest.fixture
def oddly_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution with plug-ins whose names have colons."""
    folder = tmp_path / "odd-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: odd\nVersion: 1\n")
    lines = [f"[paceline.{kind}]\nos:system = json:dumps\n" for kind in registry.KINDS]
    (folder / "entry_points.txt").write_text("".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    registry.refresh()
    yield
    monkeypatch.undo()
    registry.refresh()


@pytest.mark.usefixtures("oddly_named")
@pytest.mark.parametrize("kind", registry.KINDS)
def test_the_name_of_a_plug_in_has_no_colon(kind: str) -> None:
    with pytest.raises(InvalidError):
        registry.find(kind, "os:system")


def test_a_job_tells_which_functions_of_modules_it_names() -> None:
    sections: dict[str, Any] = {
        "reward": ["exact", "a:b", {"kind": "python", "function": "c:d"}],
        "trainer": {"objective": {"surrogate": "e:f"}, "hooks": ["g:h"]},
    }
    assert module_targets(spec_of(**sections)) == {
        "reward.1.kind": "a:b",
        "reward.2.function": "c:d",
        "trainer.objective.surrogate.kind": "e:f",
        "trainer.hooks.0.kind": "g:h",
    }
    own = spec_of(**sections, code={"digest": "0" * 64})
    assert [*module_targets(own).values()] == ["e:f", "g:h"]
    lines = list(problems(own, allowed=AllowedTargets.of(["e:f"])))
    assert [line.partition(" is")[0] for line in lines] == ["trainer.hooks.0.kind: 'g:h'"]


SLOT = """
from pathlib import Path
from pydantic import Field
from paceline.plugins import StrictModel, declares

LEAST = 0.0

@declares(needs=("group>=2",))
class SlotOptions(StrictModel):
    cap: float = Field(default=2.0, gt=LEAST)
    Path({seen!r}).write_text("run")

import torch_that_nobody_has

def loss(tokens, options: SlotOptions):
    return torch_that_nobody_has.loss(tokens)
"""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cap": 1.5}, ""),
        ({"cop": 1.5}, "surrogate.cop: unknown option of 'own_slot:loss'; allowed: cap"),
        ({"cap": 0}, "surrogate.cap: Input should be greater than 0 (got 0)"),
    ],
)
def test_options_of_a_listed_slot_are_read_from_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], told: str
) -> None:
    slot_options.cache_clear()
    (tmp_path / "own_slot.py").write_text(SLOT.format(seen=str(tmp_path / "seen")))
    monkeypatch.syspath_prepend(tmp_path)
    spec = spec_of(trainer={"objective": {"surrogate": {"kind": "own_slot:loss", **options}}})
    assert [
        *patterns(spec),
        *(line for line in problems(spec) if "own_slot:loss" not in line),
    ] == []
    assert not (tmp_path / "seen").exists()  # a module that is not listed is not even read
    lines = list(problems(spec, allowed=AllowedTargets.of(["own_slot:loss"])))
    assert [line.removeprefix("trainer.objective.") for line in lines] == ([told] if told else [])
    assert (tmp_path / "seen").exists()


def test_a_slot_that_is_not_there_is_told_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "more_slots.py").write_text(
        "import torch\n\ndef bare(tokens):\n    return tokens\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, told in (
        ("lost", "more_slots.py has no 'lost'; functions in it: bare"),
        ("bare", "(more_slots.py:3) must have a parameter `options`"),
    ):
        target = f"more_slots:{name}"
        spec = spec_of(trainer={"objective": {"surrogate": target}})
        (line,) = problems(spec, allowed=AllowedTargets.of([target]))
        assert told in line


def test_validate_refuses_what_its_options_do_not_list(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m"
    model.mkdir()
    write_readable_model(model)
    (tmp_path / "my_rewards.py").write_text("def score(item): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "job.yaml"
    rewards = ["exact", {"kind": "my_rewards:score"}]
    sizes = {"max_tokens": 4, "max_context": 32}
    job = JOB | {"model": {"path": str(model)}, "reward": rewards, "sampling": sizes}
    path.write_text(yaml.safe_dump(job))
    assert entry.main(["validate", str(path)]) == entry.Exit.INPUT
    said = capsys.readouterr().err
    assert "reward.1.kind: 'my_rewards:score' is not a function that jobs may name here" in said
    assert "`--allow my_rewards:score`" in said
    assert entry.main(["validate", str(path), "--allow", "my_rewards:other"]) == entry.Exit.INPUT
    assert entry.main(["validate", str(path), "--allow", "my_rewards"]) == entry.Exit.INPUT
    assert "--allow: write MODULE:ATTRIBUTE" in capsys.readouterr().err
    assert entry.main(["validate", str(path), "--allow", "my_rewards:score"]) == entry.Exit.OK
