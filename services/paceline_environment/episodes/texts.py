"""The text of a finished episode, for whoever reads it without the model's tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.types import Transcript
from paceline_environment.jobs import GroupContext


async def texts_of(transcripts: Sequence[Transcript], group: GroupContext) -> tuple[str, str]:
    """`prompt_text` and `completion_text` of the trajectory with these transcripts.

    Raises:
        PacelineError: as `JobTokenizer.turn_text`.
    """
    if not transcripts or group.job.outside is not None:  # messages are text already
        return "", ""
    first = transcripts[0]
    num_prompt_tokens = first.num_prompt_tokens
    prompt = await group.prompt_text(first.tokens[:num_prompt_tokens])
    if len(transcripts) == 1 and num_prompt_tokens + first.num_policy_tokens == len(first.tokens):
        return prompt, ""  # one turn, whose text is the response
    completion = first.tokens[num_prompt_tokens:]
    return prompt, await group.job.tokens.turn_text(completion, keep_special=True)
