from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.enums import TokenSource
from paceline.errors import InvalidError
from paceline.plugins import Message, Observation
from paceline.tokens.chat import Tokenizer
from paceline.tokens.dialogue import Dialogue
from paceline.tokens.turn_end import turn_end_warning

CHATML = (
    "{% for message in messages %}\n"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{- bos_token }}\n"
    "{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content']|trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}\n"
    "{{- '<|start|>system<|end|>\n\n' + system + '<|eot|>' }}\n"
    "{%- for message in messages %}\n"
    "{{- '<|start|>' + message.role + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{%- endif %}"
)
TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message | tojson }}{% endgeneration %}"
    "{% else %}{{ message | tojson }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}>>{% endif %}"
)
REWRITES = (
    "{% for message in messages %}{% if loop.last or message.role != 'assistant' %}"
    "{{ message.role + ': ' + message.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
# As in Qwen2.5: tools in the system message, and one block for all answers to a turn.
QWEN = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
    {{- "\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# As in Llama 3.1: what a tool answers is a JSON string.
IPYTHON = """{%- if tools %}{{- tools[0] | tojson }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{- '<|start|>ipython<|end|>' + message.content | tojson }}
    {%- else %}{{- '<|start|>' + message.role + '<|end|>' + message.content }}{%- endif %}
    {{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>' }}{%- endif %}"""
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]


def build_files(template: str, eos: str = "<|im_end|>") -> dict[str, bytes]:
    """A character tokenizer with the special tokens of the templates."""
    characters = [chr(c) for c in range(32, 127)] + ["\n", "é"]
    vocab = {text: i for i, text in enumerate([*SPECIAL, *characters])}
    fast = FastTokenizer(models.WordLevel(vocab, unk_token=" "))
    fast.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    fast.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    fast.add_special_tokens(SPECIAL)
    config = {"bos_token": "<s>", "eos_token": {"content": eos}, "chat_template": template}
    return {
        "tokenizer.json": fast.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [vocab[eos], 0]}).encode(),
    }


def reference(files: dict[str, bytes], folder: Path) -> Any:
    (folder / "tokenizer.json").write_bytes(files["tokenizer.json"])
    config = json.loads(files["tokenizer_config.json"])
    return PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token=config["bos_token"],
        eos_token=config["eos_token"]["content"],
        chat_template=config["chat_template"],
    )


DIALOGUE = [
    Message("system", "  Be brief. "),
    Message("user", "What is 1+1?"),
    Message("assistant", "2"),
    Message("user", 'And "é"?'),
]


@pytest.mark.parametrize("template", [CHATML, LLAMA, TOOLS])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_rendering_is_that_of_transformers(template: str, length: int, tmp_path: Path) -> None:
    files = build_files(template)
    messages = DIALOGUE[:length]
    plain = [{"role": m.role, "content": m.content} for m in messages]
    other = reference(files, tmp_path)
    tokenizer = Tokenizer.from_files(files)
    text = other.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    assert tokenizer.render(messages) == text
    tokens = other.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(text) == tokens


@pytest.mark.parametrize(("template", "eos"), [(CHATML, "<|im_end|>"), (LLAMA, "<|eot|>")])
def test_turns_rendered_one_by_one_equal_the_full_dialogue(template: str, eos: str) -> None:
    tokenizer = Tokenizer.from_files(build_files(template, eos))
    dialogue = Dialogue(tokenizer)
    first = dialogue.show(Observation(messages=tuple(DIALOGUE[:2])))
    reply = [*tokenizer.encode("2"), tokenizer.eos[0]]
    dialogue.turn(reply)
    second = dialogue.show(Observation(messages=tuple(DIALOGUE[3:])))
    whole = [*first.tokens, *reply, *second.tokens]
    assert whole == tokenizer.encode(tokenizer.render(DIALOGUE))


def test_a_turn_cut_short_gets_its_end_from_the_template() -> None:
    tokenizer = Tokenizer.from_files(build_files(CHATML))
    dialogue = Dialogue(tokenizer)
    dialogue.show(Observation(messages=(Message("user", "a"),)))
    dialogue.turn(tokenizer.encode("2"))
    second = dialogue.show(Observation(messages=(Message("user", "b"),)))
    assert second.tokens[0] == tokenizer.eos[0]
    assert second.spans[0].source is TokenSource.TEMPLATE


def test_content_belongs_to_the_environment_and_the_rest_to_the_template() -> None:
    tokenizer = Tokenizer.from_files(build_files(CHATML))
    shown = Dialogue(tokenizer).show(Observation(messages=(Message("user", "1+1="),)))
    spans = [span for span in shown.spans if span.source is TokenSource.ENVIRONMENT]
    (only,) = spans
    assert tokenizer.decode(shown.tokens[only.start : only.end]) == "1+1="
    assert shown.spans[0].start == 0
    assert shown.spans[-1].end == len(shown.tokens)


def test_a_template_that_rewrites_history_fails_in_the_second_turn_only() -> None:
    dialogue = Dialogue(Tokenizer.from_files(build_files(REWRITES)))
    dialogue.show(Observation(messages=(Message("user", "a"),)))
    dialogue.turn((5,))
    with pytest.raises(InvalidError, match="drops earlier turns"):
        dialogue.show(Observation(messages=(Message("user", "b"),)))


def test_a_template_with_the_time_may_have_several_turns() -> None:
    tokenizer = Tokenizer.from_files(build_files("{{ strftime_now('%f') }}" + CHATML))
    dialogue = Dialogue(tokenizer)
    for number in range(3):
        dialogue.show(Observation(messages=(Message("user", f"{number}"),)))
        dialogue.turn(())


def test_without_a_template_the_text_is_shown() -> None:
    tokenizer = Tokenizer.from_files(build_files(""))
    shown = Dialogue(tokenizer).show(Observation(messages=(Message("user", "x"),), text="1+1="))
    assert not tokenizer.chat
    assert tokenizer.decode(shown.tokens) == "1+1="


def test_end_tokens_come_from_model_and_tokenizer() -> None:
    files = build_files(CHATML)
    assert Tokenizer.from_files(files).eos == (2, 0)
    del files["generation_config.json"]
    assert Tokenizer.from_files(files).eos == (2,)


def test_a_template_may_be_a_file_or_one_of_many() -> None:
    files = build_files("")
    files["chat_template.jinja"] = b"file"
    assert Tokenizer.from_files(files).render(DIALOGUE) == "file"
    del files["chat_template.jinja"]
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    files["tokenizer_config.json"] = json.dumps({"chat_template": named}).encode()
    assert Tokenizer.from_files(files).render(DIALOGUE) == "d"
    assert Tokenizer.from_files(files).render(DIALOGUE, tools=(ADD,)) == "t"


def test_a_model_without_tokenizer_is_refused() -> None:
    with pytest.raises(InvalidError, match=r"no tokenizer\.json"):
        Tokenizer.from_files({"config.json": b"{}"})


def test_a_template_that_refuses_says_why() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidError, match="roles must alternate"):
        Tokenizer.from_files(build_files(template)).render(DIALOGUE)


def test_a_template_cannot_reach_python() -> None:
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(InvalidError, match="chat template"):
        Tokenizer.from_files(build_files(template)).render(DIALOGUE)


ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ASKED = Observation(messages=tuple(DIALOGUE[:2]), tools=(ADD,))
ANSWERS = (Message("tool", '2 "\n"', name="add"), Message("tool", "error", name="add"))


@pytest.mark.parametrize("template", [TOOLS, QWEN, IPYTHON])
def test_tools_are_rendered_as_by_transformers(template: str, tmp_path: Path) -> None:
    files = build_files(template)
    plain = [{"role": m.role, "content": m.content} for m in DIALOGUE]
    text = reference(files, tmp_path).apply_chat_template(
        plain, tools=[ADD], add_generation_prompt=True, tokenize=False
    )
    assert '"add"' in text
    assert Tokenizer.from_files(files).render(DIALOGUE, tools=(ADD,)) == text


@pytest.mark.parametrize(("template", "eos"), [(QWEN, "<|im_end|>"), (IPYTHON, "<|eot|>")])
def test_turns_with_tools_rendered_one_by_one_equal_the_full_dialogue(
    template: str, eos: str
) -> None:
    tokenizer = Tokenizer.from_files(build_files(template, eos))
    dialogue = Dialogue(tokenizer)
    tokens = [*dialogue.show(ASKED).tokens]
    messages = [*ASKED.messages]
    for said, heard in (("<tool_call>{}", ANSWERS), ("hm", (Message("user", "Well?"),))):
        reply = [*tokenizer.encode(said), tokenizer.eos[0]]
        dialogue.turn(reply)
        tokens += [*reply, *dialogue.show(Observation(messages=heard)).tokens]
        messages += [Message("assistant", said), *heard]
    assert tokens == tokenizer.encode(tokenizer.render(messages, tools=(ADD,)))


@pytest.mark.parametrize(("template", "eos"), [(QWEN, "<|im_end|>"), (IPYTHON, "<|eot|>")])
def test_what_tools_answer_is_marked_as_theirs(template: str, eos: str) -> None:
    tokenizer = Tokenizer.from_files(build_files(template, eos))
    dialogue = Dialogue(tokenizer)
    dialogue.show(ASKED)
    dialogue.turn(tokenizer.eos[:1])
    shown = dialogue.show(Observation(messages=ANSWERS))
    own = [span for span in shown.spans if span.source is TokenSource.TOOL]
    texts = [tokenizer.decode(shown.tokens[span.start : span.end]) for span in own]
    assert texts in (['2 "\n"', "error"], ['2 \\"\\n\\"', "error"])


@pytest.mark.parametrize(
    ("template", "tools", "told"),
    [
        (CHATML, (ADD,), r"model\.path: the chat template ignores `tools`"),
        ("", (ADD,), r"model\.path: the model has no chat template, but this environment offers"),
        ("{{ raise_exception('no tools here') }}", (ADD,), "no tools here"),
        (QWEN, ({"name": "add"},), r"tools\[0\]: \{'name': 'add'\}; allowed: \{type: function"),
    ],
)
def test_tools_that_cannot_be_shown_are_refused(
    template: str, tools: tuple[dict[str, Any], ...], told: str
) -> None:
    dialogue = Dialogue(Tokenizer.from_files(build_files(template)))
    with pytest.raises(InvalidError, match=told):
        dialogue.show(Observation(messages=ASKED.messages, tools=tools))


def test_tools_come_with_the_first_observation_only() -> None:
    dialogue = Dialogue(Tokenizer.from_files(build_files(QWEN)))
    dialogue.show(Observation(messages=ASKED.messages))
    dialogue.turn((2,))
    with pytest.raises(InvalidError, match="only the first observation"):
        dialogue.show(ASKED)


def test_special_tokens_stay_in_a_turn_that_may_call_tools() -> None:
    tokenizer = Tokenizer.from_files(build_files(QWEN))
    tokens = [*tokenizer.encode("<|start|>a"), tokenizer.eos[0]]
    assert tokenizer.turn_text(tokens, keep_special=True) == "<|start|>a"
    assert tokenizer.turn_text(tokens, keep_special=False) == "a"


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = Observation(
    messages=(
        Message("user", "1+1?"),
        Message("assistant", "", tool_calls=(CALL,)),
        Message("tool", "2", name="add"),
    )
)
SHOWS_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% endfor %}"
)
WANTS_CALLS = SHOWS_CALLS.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{{ raise_exception('a call is due') }}{% endif %}",
)


@pytest.mark.parametrize("template", [SHOWS_CALLS, WANTS_CALLS])
def test_calls_of_tools_are_rendered_as_by_transformers(template: str, tmp_path: Path) -> None:
    files = build_files(template)
    plain: list[dict[str, Any]] = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "2", "name": "add"},
    ]
    text = reference(files, tmp_path).apply_chat_template(
        plain, add_generation_prompt=True, tokenize=False
    )
    assert '"add"' in text
    tokenizer = Tokenizer.from_files(files)
    assert tokenizer.render(CALLED.messages) == text
    assert [*Dialogue(tokenizer).show(CALLED).tokens] == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("template", "told"),
    [(CHATML, "the chat template ignores `tool_calls`"), ("", "the model has no chat template")],
)
def test_calls_of_tools_that_cannot_be_shown_are_refused(template: str, told: str) -> None:
    dialogue = Dialogue(Tokenizer.from_files(build_files(template)))
    with pytest.raises(InvalidError, match=told):
        dialogue.show(CALLED)


@pytest.mark.parametrize(
    ("template", "eos", "warned"),
    [
        (CHATML, "<|im_end|>", False),
        (CHATML, "<|eot|>", True),
        ("", "<|eot|>", False),
        ("{{ raise_exception('only one turn') }}", "<|eot|>", False),
    ],
)
def test_a_template_that_ends_turns_otherwise_than_the_policy_is_told(
    template: str, eos: str, warned: bool
) -> None:
    told = turn_end_warning(Tokenizer.from_files(build_files(template, eos)))
    assert bool(told) is warned
    if warned:
        assert "ends a turn with '<|im_end|>', but the policy's turns end with '<|eot|>'" in told


@pytest.mark.parametrize("wrong", ["2", 2.0, [None, 2], True, [-1], {"a": 1}])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_ends_of_turns_that_are_no_ids_are_refused(name: str, wrong: Any) -> None:
    files = build_files(CHATML)
    files |= {"generation_config.json": b"{}", name: json.dumps({"eos_token_id": wrong}).encode()}
    with pytest.raises(InvalidError, match=rf"{name}: eos_token_id is .* an id or a list of ids"):
        Tokenizer.from_files(files)
