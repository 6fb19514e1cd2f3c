"""Special tokens are those of transformers, whichever of the small files declares them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer

from paceline.errors import InvalidError
from paceline.plugins import Message
from paceline.tokens.chat import Tokenizer

Doc = dict[str, Any]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LACKS = "does not have '<|im_start|>' as a token of its own, which "
NEW = {"content": "<|im_start|>", "special": True}


def written(tokens: list[str], settings: Doc, **more: Doc) -> dict[str, bytes]:
    """Files of a byte-level tokenizer that has these tokens of its own."""
    fast: Any = FastTokenizer(models.BPE())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast.model = models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[])
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens])
    tokenizer = json.loads(fast.to_str())
    tokenizer["model"] |= more.pop("model", {})
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML,
        **settings,
    }
    files: dict[str, Doc] = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    others = {f"{name}.json": content for name, content in more.items()}
    return {name: json.dumps(content).encode() for name, content in (files | others).items()}


ALL = ["<|im_start|>", "<|im_end|>", "<s>", "<a>"]
USED = "{{ boa_token }}{{ mask_token }}{{ bos_token }}" + CHATML


@pytest.mark.parametrize(
    "files",
    [
        written(ALL, {}),
        written(ALL, {"chat_template": USED}),
        written(ALL, {"chat_template": USED, "mask_token": "<a>"}),
        written(ALL, {"chat_template": USED, "extra_special_tokens": {"boa_token": "<a>"}}),
        written(
            ALL, {"chat_template": USED, "model_specific_special_tokens": {"boa_token": "<a>"}}
        ),
        written(
            ALL,
            {"chat_template": USED, "bos_token": "<s>"},
            special_tokens_map={"bos_token": "<a>", "mask_token": {"content": "<s>"}},
        ),
        written(
            ALL,
            {"chat_template": USED, "added_tokens_decoder": {"256": NEW}},
            special_tokens_map={"bos_token": "<a>"},
        ),
        # What a template does not show may be missing.
        written(ALL, {"pad_token": "[PAD]", "additional_special_tokens": ["<b>"]}),
    ],
)
def test_prompts_have_the_tokens_of_transformers(files: dict[str, bytes], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path)
    asked: Any = [{"role": "user", "content": "What is 2?"}]
    expected = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    ours = Tokenizer.from_files(files)
    assert ours.encoded(ours.render([Message("user", "What is 2?")])).ids == expected


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (
            written(ALL[1:], {"added_tokens_decoder": {"259": NEW}}),
            f"{LACKS}tokenizer_config.json (added_tokens_decoder) declares",
        ),
        (written(ALL[1:], {}, added_tokens={"<|im_start|>": 259}), f"{LACKS}added_tokens.json"),
        (
            written(ALL[1:], {"additional_special_tokens": ["<|im_start|>"]}),
            f"{LACKS}tokenizer_config.json (additional_special_tokens)",
        ),
        (
            written(ALL[1:], {"extra_special_tokens": [NEW]}),
            f"{LACKS}tokenizer_config.json (extra_special_tokens)",
        ),
        (
            written(ALL, {"chat_template": USED, "bos_token": "<b>"}),
            "'<b>' as a token of its own, which tokenizer_config.json (bos_token)",
        ),
        (written(ALL, {"eos_token": "<b>"}), "does not have the eos_token '<b>', so no turn"),
        (written(ALL, {}, model={"dropout": 0.5}), "dropout is 0.5, so the same text"),
        (written(ALL, {"split_special_tokens": True}), "split_special_tokens is true"),
        (
            written(ALL, {"chat_template": [{"name": "rag", "template": CHATML}]}),
            "chat_template has the names ['rag'], and none is 'default'",
        ),
    ],
)
def test_what_would_get_other_tokens_is_refused(files: dict[str, bytes], told: str) -> None:
    with pytest.raises(InvalidError) as refused:
        Tokenizer.from_files(files)
    assert told in refused.value.message
