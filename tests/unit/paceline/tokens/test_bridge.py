"""A dialogue played in turns has the tokens of the whole, for shapes of templates and tokenizers.

The templates are written after published families; the expected text is put together from their
parts, without a template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from paceline.enums import TokenSource
from paceline.errors import InvalidError
from paceline.plugins import Message, Observation
from paceline.tokens.chat import Tokenizer
from paceline.tokens.dialogue import Dialogue


@dataclass(frozen=True)
class Family:
    """The shape of a chat template. `{}` stands for the content of a message."""

    block: str = "<|im_start|>user\n{}<|im_end|>\n"
    prompt: str = "<|im_start|>assistant\n"  # for the policy's next turn
    header: str | None = None  # of an earlier turn; None: as `prompt`
    end: str = "<|im_end|>\n"  # of an earlier turn
    last_end: str | None = None  # of the last one; None: as `end`
    stop: str = "<|im_end|>"  # with which the policy ends
    after_stop: str = "\n"  # what is left of `end`
    opening: str = ""
    content: str = "m.content"
    tool_block: str = ""  # if tools reply
    wants_calls: bool = False

    @property
    def role(self) -> str:
        """Who replies to the policy."""
        return "tool" if self.tool_block else "user"

    @property
    def reply_block(self) -> str:
        """That of a message that replies."""
        return self.tool_block or self.block

    @property
    def template(self) -> str:
        header = self.prompt if self.header is None else self.header
        last = self.end if self.last_end is None else self.last_end
        call = "{% if m.tool_calls %}<call>{{ m.tool_calls | length }}</call>{% endif %}"
        check = (
            "{% if not loop.last and messages[loop.index].role == 'tool' and not m.tool_calls %}"
            "{{ raise_exception('an answer without a call') }}{% endif %}"
        )
        return (
            "{% for m in messages %}{% if m.role == 'assistant' %}"
            f"{check if self.wants_calls else ''}"
            f"{_said(header)}{{{{ {self.content} }}}}{call}"
            f"{{% if loop.last %}}{_said(last)}{{% else %}}{_said(self.end)}{{% endif %}}"
            f"{{% else %}}{{% if loop.first %}}{_said(self.opening)}{{% endif %}}"
            f"{{% if m.role == 'tool' %}}{_block(self.reply_block)}"
            f"{{% else %}}{_block(self.block)}{{% endif %}}{{% endif %}}{{% endfor %}}"
            f"{{% if add_generation_prompt %}}{_said(self.prompt)}{{% endif %}}"
        )

    def joint(self, content: str, *, ended: bool) -> str:
        """What is shown between two turns."""
        shown = self.reply_block.format(content) + self.prompt
        if not ended:
            return self.end + shown
        return self.after_stop + (shown if self.end else shown.removeprefix(self.stop))


def _block(text: str) -> str:
    before, after = text.split("{}")
    return f"{_said(before)}{{{{ m.content }}}}{_said(after)}"


def _said(text: str) -> str:
    return "{{ " + json.dumps(text) + " }}"


THINK = "<|im_start|>assistant\n<think>\n"
EMPTY = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
INST = "[INST] {} [/INST]"
ANSWERS = "<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n"
FAMILIES = {
    "chatml": Family(),
    "default system prompt": Family(opening="<|im_start|>system\nBe kind.<|im_end|>\n"),
    "end of two tokens": Family(
        block="<|role|>user<|sep|>{}<|end_turn|>",
        prompt="<|role|>assistant<|sep|>",
        end="<|end_text|><|end_turn|>",
        stop="<|end_turn|>",
        after_stop="",
    ),
    "end of two tokens, stopped at the first": Family(
        block="<|role|>user<|sep|>{}<|end_turn|>",
        prompt="<|role|>assistant<|sep|>",
        end="<|end_text|><|end_turn|>",
        stop="<|end_text|>",
        after_stop="<|end_turn|>",
    ),
    "blank before the end": Family(
        opening="<s>", block=INST, prompt="", end=" </s>", stop="</s>", after_stop=""
    ),
    "blank before earlier turns": Family(
        opening="<s>", block=INST, prompt="", header=" ", end="</s>", stop="</s>", after_stop=""
    ),
    "newline before the end": Family(
        block="### user:\n{}\n<|end|>\n", prompt="### bot:\n", end="\n<|end|>\n", stop="<|end|>"
    ),
    "nothing after the end": Family(end="<|im_end|>", after_stop=""),
    "trimmed content": Family(content="m.content | trim"),
    "thinking begun by the prompt": Family(prompt=THINK, header="<|im_start|>assistant\n"),
    "no thinking, by the prompt": Family(prompt=EMPTY, header="<|im_start|>assistant\n"),
    "empty thinking in earlier turns": Family(header=EMPTY),
    "thinking of earlier turns is cut": Family(
        prompt=THINK,
        header="<|im_start|>assistant\n",
        content="m.content.split('</think>')[-1].lstrip('\\n')",
    ),
    "ended by the next role": Family(
        opening="[gMASK]<sop>",
        block="<|user|>\n{}",
        prompt="<|assistant|>",
        header="<|assistant|>\n<think></think>\n",
        end="",
        stop="<|user|>",
        after_stop="",
    ),
    "another end of the last turn": Family(
        block="<|start|>user<|message|>{}<|end|>",
        prompt="<|start|>assistant",
        header="<|start|>assistant<|channel|>final<|message|>",
        end="<|end|>",
        last_end="<|return|>",
        stop="<|return|>",
        after_stop="",
    ),
    "no special tokens": Family(
        block="user: {}\n", prompt="bot:", end="\n", stop="", after_stop=""
    ),
    "tools answer": Family(tool_block=ANSWERS),
    "tools answer calls": Family(tool_block=ANSWERS, wants_calls=True),
    "tools answer calls, ended by two tokens": Family(
        tool_block=ANSWERS,
        wants_calls=True,
        end="<|end_text|><|im_end|>",
        after_stop="",
    ),
}
KINDS = ("bytes", "bytes, blank", "legacy", "always", "first", "never")
SPECIAL = [
    *("<s>", "</s>", "<sop>", "[gMASK]", "<think>", "</think>", "<call>", "</call>"),
    *("<|im_start|>", "<|im_end|>", "<|role|>", "<|sep|>", "<|end_text|>", "<|end_turn|>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"),
    *("<|user|>", "<|assistant|>"),
]
CORPUS = [
    "What is 2 and 3? It is 5. And now? The answer is 8. user bot assistant Be kind. " * 20,
    "0123456789 []{}<>|:;,.!?\n/INST _system tool_response ### " * 20,
]


@cache
def trained(kind: str) -> str:
    """tokenizer.json of byte-level BPE, or of BPE as SentencePiece has it."""
    if kind.startswith("bytes"):
        fast: Any = FastTokenizer(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space="blank" in kind)
        fast.decoder = decoders.ByteLevel()
        alphabet, special = pre_tokenizers.ByteLevel.alphabet(), list[str]()
    else:
        fast = FastTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        if kind == "legacy":
            blanks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            fast.normalizer = normalizers.Sequence(blanks)
        else:
            fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        fast.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet, special = list[str](), ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    fast.train_from_iterator(CORPUS, trainer)
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return fast.to_str()


@cache
def tokenizer_of(family: Family, kind: str) -> Tokenizer:
    return made(family.template, family.stop, kind)


def made(template: str, eos: str, kind: str) -> Tokenizer:
    config = {"eos_token": eos, "chat_template": template}
    return Tokenizer.from_files(
        {
            "tokenizer.json": trained(kind).encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
        }
    )


WORDS = st.sampled_from(
    ["What", "is", "it?", "And", "now?", "2", "3", "[INST]", "user", "<|im", "no", "answer"]
)
TEXTS = st.lists(WORDS, min_size=1, max_size=3).map(" ".join)


@dataclass(frozen=True)
class Talk:
    """A dialogue: what is shown, each with the turn that follows and whether it is ended."""

    first: str
    turns: list[tuple[str, bool, str]] = field(default_factory=list[tuple[str, bool, str]])


DIALOGUES = st.builds(
    Talk, TEXTS, st.lists(st.tuples(TEXTS, st.booleans(), TEXTS), min_size=1, max_size=3)
)


def whole_of(family: Family, tokenizer: Tokenizer, dialogue: Talk) -> tuple[list[int], list[int]]:
    """Tokens of the whole text of a dialogue, and where each of its pieces ends."""
    pieces = [family.opening + family.block.format(dialogue.first) + family.prompt]
    for said, ended, answer in dialogue.turns:
        ended = ended and bool(family.stop)
        pieces += [said + (family.stop if ended else ""), family.joint(answer, ended=ended)]
    whole = tokenizer.encode("".join(pieces))
    ends = [len(tokenizer.encode("".join(pieces[: n + 1]))) for n in range(len(pieces))]
    for number, end in enumerate(ends):  # no token may reach from one piece into the next
        assume(tokenizer.encode("".join(pieces[: number + 1])) == whole[:end])
    return whole, ends


def in_turns(
    family: Family, tokenizer: Tokenizer, talk: Talk, whole: Sequence[int], ends: Sequence[int]
) -> list[int]:
    """The dialogue as an environment plays it, with the sampled tokens of `whole`."""
    dialogue = Dialogue(tokenizer)
    tokens = [*dialogue.show(Observation((Message("user", talk.first),))).tokens]
    for number, (_, _, answer) in enumerate(talk.turns):
        said = whole[ends[2 * number] : ends[2 * number + 1]]
        dialogue.turn(said)
        shown = dialogue.show(Observation((Message(family.role, answer, name="add"),)))
        tokens += [*said, *shown.tokens]
    return tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=8)
@given(talk=DIALOGUES)
def test_turns_are_shown_as_in_the_whole_dialogue(name: str, kind: str, talk: Talk) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family, kind)
    whole, ends = whole_of(family, tokenizer, talk)
    assert in_turns(family, tokenizer, talk, whole, ends) == whole


def test_the_user_may_reply_after_tools_did() -> None:
    family = replace(FAMILIES["another end of the last turn"], tool_block="<tool>{}<|end|>")
    tokenizer = tokenizer_of(replace(family, wants_calls=True), "bytes")
    dialogue = Dialogue(tokenizer)
    dialogue.show(says("What?"))
    for said, role, shown in (
        ("call<|end|>", "tool", "<tool>again<|end|><|start|>assistant"),
        ("5<|return|>", "user", "<|start|>user<|message|>again<|end|><|start|>assistant"),
        ("5", "user", "<|end|><|start|>user<|message|>again<|end|><|start|>assistant"),
    ):
        dialogue.turn(tokenizer.encode(said))
        tokens = dialogue.show(says("again", role=role)).tokens
        assert "".join(tokenizer.pieces(tokens)) == shown


def says(*contents: str, role: str = "user") -> Observation:
    return Observation(tuple(Message(role, content) for content in contents))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["end of two tokens", "blank before the end", "no special tokens"])
def test_what_is_shown_after_a_turn_is_marked_as_its_source(name: str, kind: str) -> None:
    family = FAMILIES[name]
    tokenizer = tokenizer_of(family, kind)
    dialogue = Dialogue(tokenizer)
    dialogue.show(says("What?"))
    dialogue.turn(tokenizer.encode("It is 5." + family.stop))
    shown = dialogue.show(says("And now?"))
    (own,) = [span for span in shown.spans if span.source is TokenSource.ENVIRONMENT]
    text = "".join(tokenizer.pieces(shown.tokens[own.start : own.end])).strip()
    assert text in "And now?"  # its ends may share tokens with the template
    assert len(text) > 3
    assert (shown.spans[0].start, shown.spans[-1].end) == (0, len(shown.tokens))


@pytest.mark.parametrize("name", ["chatml", "no thinking, by the prompt"])
def test_plain_text_is_a_message_of_the_user(name: str) -> None:
    tokenizer = tokenizer_of(FAMILIES[name], "bytes")
    plain, chat = Dialogue(tokenizer), Dialogue(tokenizer)
    for text in ("Guess a number", "", "again"):
        shown = plain.show(Observation(text=text))
        assert shown.tokens == chat.show(says(text)).tokens
        assert "<|im_start|>user" in "".join(tokenizer.pieces(shown.tokens))
        for each in (plain, chat):
            each.turn(tokenizer.encode("5<|im_end|>"))


@pytest.mark.parametrize(
    ("normalizer", "has_turns"),
    [
        (normalizers.Strip(), False),
        (normalizers.Strip(left=False), False),
        (normalizers.Prepend("x"), False),
        (normalizers.Lowercase(), True),
        (normalizers.Replace("\n", " "), True),
        (normalizers.BertNormalizer(), True),
    ],
)
def test_a_tokenizer_that_changes_the_ends_of_texts_has_one_turn(
    normalizer: Any, has_turns: bool
) -> None:
    fast: Any = FastTokenizer.from_str(trained("bytes"))
    fast.normalizer = normalizer
    family = FAMILIES["no special tokens"]
    config = {"chat_template": family.template}
    files = {"tokenizer.json": fast.to_str(), "tokenizer_config.json": json.dumps(config)}
    dialogue = Dialogue(Tokenizer.from_files({n: text.encode() for n, text in files.items()}))
    assert dialogue.show(says("What?")).tokens
    dialogue.turn(fast.encode("5").ids)
    if has_turns:
        assert dialogue.show(says("And now?")).tokens
        return
    with pytest.raises(InvalidError, match="its normalizer changes the ends of a text"):
        dialogue.show(says("And now?"))


def test_a_text_that_stands_for_turns_is_refused() -> None:
    dialogue = Dialogue(tokenizer_of(FAMILIES["chatml"], "bytes"))
    with pytest.raises(InvalidError, match="which is reserved"):
        dialogue.show(says("what \u2042paceline-turn\u2042 is this?"))


USERS = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% endif %}"
KEEPS = USERS + "{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}</s>{% endif %}"
# As in templates of Mistral: what the first message has moves to the last one.
MOVES = (
    "{% for m in messages %}{% if loop.last %}[AVAILABLE] {% endif %}"
    "<|user|>{{ m.content }}</s>{% endfor %}"
)
TWICE = "{% for m in messages %}<|user|>{{ m.content }}{{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "role", "why"),
    [
        (USERS + "{% endfor %}", "user", "the chat template drops earlier turns"),
        (TWICE, "user", "the chat template drops earlier turns"),
        (MOVES, "user", "the chat template rewrites earlier messages"),
        (KEEPS + "{% endfor %}", "tool", "does not show a message with the role 'tool'"),
        (
            "{{ messages[0].content }}"
            "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}",
            "user",
            "one turn",
        ),
    ],
)
def test_templates_whose_turns_cannot_be_continued_are_refused(
    template: str, role: str, why: str
) -> None:
    tokenizer = made(template, "</s>", "bytes")
    dialogue = Dialogue(tokenizer)
    dialogue.show(says("What?"))
    dialogue.turn(tokenizer.encode("5</s>"))
    with pytest.raises(InvalidError, match=why):
        dialogue.show(says("again", role=role))


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_first_message_that_the_template_ignores_is_refused(role: str) -> None:
    template = (
        "{% for m in messages %}{% if m.role != 'ROLE' %}{{ m.content }}{% endif %}{% endfor %}"
    )
    dialogue = Dialogue(made(template.replace("ROLE", role), "</s>", "bytes"))
    with pytest.raises(InvalidError, match=f"ignores the content of message .*'{role}'"):
        dialogue.show(Observation(messages=(Message("system", "s"), Message("user", "hi"))))


@pytest.mark.parametrize("shown", ["m.content | upper", "m.content | tojson", "m.content | trim"])
def test_a_first_message_may_be_shown_in_another_form(shown: str) -> None:
    template = "{% for m in messages %}{{ " + shown + " }}{% endfor %}"
    Dialogue(made(template, "</s>", "bytes")).show(says(' "what"\nnow '))
