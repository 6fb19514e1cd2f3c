"""Tokenizers of jobs in processes of the jobs: the same tokens, and bounds on hostile ones."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from paceline.config.tokenizers import TokenizerSettings
from paceline.errors import InvalidError, LimitError, PacelineError
from paceline.isolation.code.tokenizers.frames import ShowCall, Shown, answers_of
from paceline.isolation.code.tokenizers.jobs import (
    MAX_ENDS,
    JobTokenizer,
    LocalTokenizer,
    ProcessTokenizers,
)
from paceline.isolation.code.tokenizers.process import TokenProcess
from paceline.isolation.frames import Frame, FrameError
from paceline.isolation.sandbox import landlock
from paceline.isolation.sandbox.sandbox import Sandbox
from paceline.isolation.sandbox.zygote import NAMESPACES
from paceline.plugins import Message, Observation
from paceline.tokens.chat import Tokenizer
from paceline.tokens.dialogue import DialogueState
from paceline_harness.patience import PATIENCE_S
from paceline_harness.processes import sealed_processes

pytestmark = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock with scopes")

SETTINGS = TokenizerSettings(timeout_s=3.0, load_s=60.0, memory_bytes=512 << 20)
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
QWEN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}</s>"
    "{% endfor %}<assistant>"
)
MODELS = Path(__file__).parents[5] / "models"
FUNCTION = {"name": "add", "description": "é", "parameters": {}}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
DIALOGUE = (
    Observation(
        messages=(Message("system", "Be brief."), Message("user", "12+34=? \u00e9\U0001f600"))
    ),
    Observation(messages=(Message("user", "why?"),)),
    Observation(messages=(Message("tool", '{"sum": 3}', name="add", tool_call_id="id7"),)),
)
CALLED = Observation(
    messages=(
        Message("assistant", "", tool_calls=(CALL,)),
        Message("tool", "4", tool_call_id="id8"),
    )
)


def files_of(template: str = CHAT, *, normalizer: Any = None) -> dict[str, bytes]:
    vocab = {
        each: i for i, each in enumerate(["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    fast: Any = FastTokenizer(models.BPE(vocab, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["</s>"])
    if normalizer is not None:
        fast.normalizer = normalizer
    config = {"eos_token": "</s>", "chat_template": template}
    return {
        "tokenizer.json": fast.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def large() -> dict[str, bytes]:
    """Files whose vocabulary needs some hundred MiB."""
    vocab = json.dumps({f"word{i}": i for i in range(800_000)})
    model = f'{{"type": "WordLevel", "vocab": {vocab}, "unk_token": "word0"}}'
    return {"tokenizer.json": f'{{"version": "1.0", "model": {model}}}'.encode()}


class Stage:
    """Tokenizers of jobs whose files are given here."""

    def __init__(self, made: ProcessTokenizers) -> None:
        self.made = made

    async def of(self, job_id: str, files: Mapping[str, bytes]) -> JobTokenizer:
        async def fetch() -> Mapping[str, bytes]:
            return files

        return await self.made.of(job_id, fetch)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = ProcessTokenizers(SETTINGS)
    yield Stage(made)
    await made.close()


async def say(tokenizer: JobTokenizer, *, tools: bool = False) -> list[Any]:
    """Everything that a dialogue of several turns gets from a tokenizer."""
    state, found = DialogueState(), list[Any]()
    for number, each in enumerate((*DIALOGUE, CALLED) if tools else DIALOGUE):
        offered = Observation(each.messages, tools=(TOOL,)) if tools and not number else each
        rendered, prefix = await tokenizer.show(state.observed(offered))
        state.shown(prefix)
        state.turn(tokenizer.eos[:1])
        text = await tokenizer.turn_text(
            [*rendered.tokens, tokenizer.eos[0]], keep_special=bool(number)
        )
        found.append((rendered.tokens, rendered.spans, text))
    return found


async def show(tokenizer: JobTokenizer, text: str = "1+1=") -> int:
    state = DialogueState()
    rendered, _ = await tokenizer.show(
        state.observed(Observation(messages=(Message("user", text),), text=text))
    )
    return len(rendered.tokens)


@pytest.mark.parametrize("name", ["arithmetic", "smollm2-135m-instruct", "chat", "tools"])
async def test_a_process_returns_what_the_tokenizer_itself_does(stage: Stage, name: str) -> None:
    folder = MODELS / name
    if name == "chat" or name == "tools":
        files = files_of(QWEN if name == "tools" else CHAT)
    elif folder.is_dir():
        names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")
        files = {each: (folder / each).read_bytes() for each in names if (folder / each).is_file()}
    else:
        pytest.skip(f"no models/{name}")
    local = LocalTokenizer(Tokenizer.from_files(files))
    remote = await stage.of("job", files)
    tools = name == "tools"
    assert remote.eos == local.eos
    assert await say(remote, tools=tools) == await say(local, tools=tools)
    assert await show(remote, "") == await show(local, "")


GROWS = normalizers.Sequence([normalizers.Replace("a", "aaaaaaaaaa") for _ in range(12)])
POWER = "{{ (messages | length + 6) ** (10 ** 9) }}"
BACKTRACKS = normalizers.Replace(Regex("(a+)+c"), "c")


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (files_of(LOOPS), "model.path: chat template: takes more than 3 s"),
        (files_of("{{ messages[0].content * 10**9 }}"), "model.path: chat template: needs more"),
        (files_of(POWER), "model.path: chat template: takes more than 3 s"),
        (files_of(normalizer=GROWS), "model.path: tokenizer.json: (takes more|ends its process)"),
        (files_of(normalizer=BACKTRACKS), "model.path: tokenizer.json: .*retry-limit"),
        (files_of("{{ raise_exception('not for you') }}"), "chat template: not for you"),
        (files_of("{{ messages[7].content.x }}"), "model.path: chat template: "),
        (files_of("{{ 1 // 0 }}"), "model.path: chat template: .*zero"),
        (files_of("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}"), "chat template: .*recurs"),
    ],
)
async def test_what_harms_is_named_and_harms_only_its_own_job(
    stage: Stage, files: Mapping[str, bytes], why: str
) -> None:
    healthy, hostile = await stage.of("healthy", files_of()), await stage.of("hostile", files)
    failing = asyncio.create_task(show(hostile, "a" * 40))
    answers = 0
    while not failing.done():
        await show(healthy)
        answers += 1
        await asyncio.sleep(0.01)
    with pytest.raises(InvalidError, match=why):
        await failing
    assert answers > 1 or "takes more than 3 s" not in why


@pytest.mark.parametrize(
    ("make", "why", "load_s"),
    [
        (lambda: {"tokenizer.json": b"{}"}, "model.path: tokenizer.json cannot be read", 10.0),
        (dict[str, bytes], "model.path: no tokenizer.json", 10.0),
        (lambda: files_of("{% for %}"), "model.path: the chat template cannot be read", 10.0),
        (lambda: files_of("{{ " + "(" * 5000), "chat template", 10.0),
        (
            lambda: files_of("{{ 7 ** (10 ** 9) }}"),
            "model.path: chat template: reading it takes",
            2.0,
        ),
        (large, "model.path: tokenizer.json: reading it takes more than 0.01 s", 0.01),
        (large, "model.path: tokenizer.json: reading it ends its process", 10.0),
    ],
)
async def test_files_that_cannot_be_read_are_named(
    make: Callable[[], Mapping[str, bytes]], why: str, load_s: float
) -> None:
    files = make()
    made = ProcessTokenizers(TokenizerSettings(load_s=load_s, memory_bytes=256 << 20))
    stage = Stage(made)
    seconds = list[float]()
    try:
        for _ in range(6):
            since = time.monotonic()
            with pytest.raises(InvalidError, match=why):
                await stage.of("job", files)
            seconds.append(time.monotonic() - since)
        assert min(seconds[1:]) < seconds[0]  # known by then
    finally:
        await made.close()


async def test_calls_beside_one_that_hangs_are_answered(stage: Stage) -> None:
    loops = "{% if messages[0].content == 'bad' %}" + LOOPS + "{% endif %}" + CHAT
    tokenizer = await stage.of("job", files_of(loops))
    texts = ["good"] * 5 + ["bad"] + ["good"] * 5
    found = await asyncio.gather(*(show(tokenizer, text) for text in texts), return_exceptions=True)
    assert [isinstance(each, InvalidError) for each in found] == [text == "bad" for text in texts]
    assert await show(tokenizer, "good") == found[0]


async def test_a_tokenizer_that_always_hangs_is_not_started_again() -> None:
    made = ProcessTokenizers(SETTINGS.model_copy(update={"timeout_s": 1.0}))
    tokenizer = await Stage(made).of("job", files_of(LOOPS))
    seconds = list[float]()
    for _ in range(MAX_ENDS + 2):
        since = time.monotonic()
        with pytest.raises(InvalidError, match="chat template: takes more"):
            await show(tokenizer)
        seconds.append(time.monotonic() - since)
    assert min(seconds[MAX_ENDS:]) < min(seconds[:MAX_ENDS])
    await none_is_left()
    await made.close()


async def test_the_end_of_a_job_kills_its_process_at_once(stage: Stage) -> None:
    tokenizer = await stage.of("job", files_of(LOOPS))
    hanging = asyncio.create_task(show(tokenizer))
    await asyncio.sleep(0.3)
    assert len(sealed_processes()) == 1
    await stage.made.end("job")
    with pytest.raises(PacelineError, match="the job is over"):
        await hanging
    await none_is_left()


async def test_text_that_is_too_long_once_rendered_is_refused(stage: Stage) -> None:
    tokenizer = await stage.of("job", files_of("{{ messages[0].content * 1000 }}"))
    state = DialogueState(max_bytes=10_000)
    step = state.observed(Observation(messages=(Message("user", "x" * 100),)))
    with pytest.raises(LimitError, match="prompt_bytes"):
        await tokenizer.show(step)


async def test_a_process_that_dies_is_replaced(stage: Stage) -> None:
    tokenizer = await stage.of("job", files_of())
    length = await show(tokenizer)
    for process in sealed_processes():
        process.kill()
    assert await show(tokenizer) == length


async def test_the_process_of_a_tokenizer_is_sealed(stage: Stage) -> None:
    await show(await stage.of("job", files_of()))
    (process,) = sealed_processes()
    status = Path(f"/proc/{process.pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    assert (fields["NoNewPrivs"].strip(), fields["Seccomp"].strip()) == ("1", "2")
    for capabilities in ("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"):
        assert int(fields[capabilities], 16) == 0, capabilities


async def test_where_nothing_can_be_sealed_processes_are_bounded_all_the_same() -> None:
    sandbox = Sandbox(lowest=NAMESPACES + 1)
    settings = SETTINGS.model_copy(update={"memory_bytes": 256 << 20})
    step = DialogueState().observed(DIALOGUE[0])
    local = LocalTokenizer(Tokenizer.from_files(files_of()))
    process = await TokenProcess.start(files_of(), sandbox=sandbox, settings=settings)
    answers = [answer async for answer in process.ask([ShowCall(step)], tell=False)]
    shown, expected = cast("Shown", answers[0]), await local.show(step)
    assert (shown[0].tokens, shown[1]) == (expected[0].tokens, expected[1])
    await process.kill()
    with pytest.raises(InvalidError, match="reading it ends"):
        await TokenProcess.start(large(), sandbox=sandbox, settings=settings)
    await sandbox.close()


@pytest.mark.parametrize(
    "head",
    [
        {"answers": [{"text": 9}]},
        {"answers": [{"text": -1}]},
        {"answers": [{"text": 4}]},
        {"answers": [{"tokens": 3, "spans": [[0, 1, 0]], "prefix": [0, 0]}]},
        {"answers": [{"tokens": 4, "spans": [[0, 1, 0]], "prefix": [0, 0]}]},
        {"answers": [{"tokens": 0, "spans": [[0, 1, 0]], "prefix": [0, 0]}]},
        {"answers": [{"tokens": 0, "spans": [], "prefix": [-1, 0]}]},
        {"answers": [{"tokens": 0, "spans": []}]},
        {"answers": [[]]},
        {"answers": 5},
        {"at": ["tokenizer.json"]},
        {},
    ],
)
def test_a_process_that_answers_something_else_is_not_believed(head: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        answers_of(Frame(head, {"bodies": b"\xff\xff\xff\xff"}))  # as a token, -1; as text, none


async def none_is_left() -> None:
    async with asyncio.timeout(PATIENCE_S):  # the kernel takes a moment
        while sealed_processes():
            await asyncio.sleep(0.01)
