"""Whether the policy's turns end where those of the chat template do."""

from __future__ import annotations

from paceline.errors import InvalidError
from paceline.plugins import Message
from paceline.tokens.chat import Tokenizer

_SAID = "\u2042said\u2042"
_ASKED = Message("user", "Hello")


def turn_end_warning(tokenizer: Tokenizer) -> str:
    """What to tell about a chat template that ends turns with no token that ends the policy's.

    Empty for models without a template, and for templates that refuse such a dialogue.
    """
    if not tokenizer.chat:
        return ""
    try:
        text = tokenizer.render((_ASKED, Message("assistant", _SAID), _ASKED))
    except InvalidError:
        return ""
    _, is_shown, rest = text.partition(_SAID)
    tokens = tokenizer.encode(rest)
    if not is_shown or not tokens or not set(tokens).isdisjoint(tokenizer.eos):
        return ""
    ends = ", ".join(repr(tokenizer.token(each)) for each in tokenizer.eos) or "nothing"
    return (
        f"model.path: the chat template ends a turn with {tokenizer.token(tokens[0])!r}, but the "
        f"policy's turns end with {ends}: it may never end one, or end it twice. Add the id "
        f"{tokens[0]} to eos_token_id of generation_config.json, or the text to sampling.stop"
    )
