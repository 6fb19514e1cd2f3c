"""What docs/reward-models.md says of models in the folder of a job holds in its seal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from paceline.isolation.code.folders import CodeFolder
from paceline.isolation.sandbox import landlock
from paceline.platform.fair_queue import QueueOwner
from paceline.testing.rewards import item
from paceline.types import Score
from paceline_harness.documents.snippets import snippets
from paceline_harness.patience import PATIENCE_S
from paceline_reward.job_pools import JobPools
from paceline_reward.parts import read_parts

PAGE = Path(__file__).parents[2] / "docs" / "reward-models.md"
PYTHON = [each.body for each in snippets(PAGE) if each.language == "python"]
TRAINED, NUMPY, TORCH = PYTHON[:3]
Scored = Callable[..., Awaitable[list[Score]]]
OWNER = QueueOwner("default", "job")
pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")
# A model with random weights whose tokenizer has the letters as words.
TINY = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

words = {"<unk>": 0, **{letter: n for n, letter in enumerate("abcdefghij", 1)}}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(sys.argv[1])
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
config = BertConfig(vocab_size=11, num_attention_heads=2, type_vocab_size=1, **sizes)
BertForSequenceClassification(config).save_pretrained(sys.argv[1])
"""


@pytest.fixture
async def score(tmp_path: Path) -> AsyncIterator[Scored]:
    """Scores responses with a function of `tmp_path`, as a reward worker does."""
    for each in (tmp_path, *tmp_path.parents):  # the sandbox may run as another user
        if each.owner() == "root":
            each.chmod(each.stat().st_mode | 0o5)

    async def folder_of(code: str, owner: QueueOwner) -> CodeFolder:
        del code, owner
        return CodeFolder(tmp_path)

    pools = JobPools(processes=1, folder_of=folder_of)

    async def scored(kind: str, *responses: str) -> list[Score]:
        section = json.dumps([{"kind": kind, "timeout_s": PATIENCE_S}])
        (part,) = read_parts(section, has_code=True)
        items = [item(each) for each in responses]
        return await pools.run("code", part, items, owner=OWNER)

    yield scored
    await pools.close()


async def test_the_classifier_of_the_page_scores_in_its_seal(
    score: Scored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(TRAINED, {})
    (tmp_path / "weights.npz").write_bytes((tmp_path / "polite/weights.npz").read_bytes())
    helpers = TRAINED.partition("\n\n\ndef train")[0]
    (tmp_path / "scoring.py").write_text(f"{helpers}\n\n\n{NUMPY}")
    kind, rude = await score("scoring:politeness", "Thank you, kind one.", "You stupid idiot.")
    assert (kind.status, rude.status) == ("ok", "ok"), kind.detail
    assert kind.reward > 0.6
    assert rude.reward < 0.4


@pytest.mark.slow
async def test_an_encoder_of_torch_fits_into_the_seal(score: Scored, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", TINY, str(tmp_path / "model")], check=True)
    for each in (tmp_path / "model").iterdir():
        each.chmod(0o644)  # as workers unpack it
    (tmp_path / "liking.py").write_text(TORCH)
    (found,) = await score("liking:liked", "abc")
    assert found.status == "ok", found.detail
    assert 0 < found.reward < 1
