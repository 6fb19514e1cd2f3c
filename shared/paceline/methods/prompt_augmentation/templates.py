"""The instruction templates, in our own words, by the way in which they ask for the answer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.errors import InvalidError
from paceline.plugins import StrictModel

QUESTION = "{question}"
_THINK = ("<think>", "</think>", "<answer>", "</answer>")
_REASON = ("<reasoning>", "</reasoning>", "<solution>", "</solution>")
Tag = Annotated[str, Field(min_length=1, max_length=32)]


class PromptTemplate(StrictModel):
    """An instruction around a question."""

    name: str = Field(min_length=1, max_length=64)
    text: str = Field(max_length=8192)
    """Has `{question}` once."""
    tags: tuple[Tag, ...] = Field(default=(), max_length=8)
    """Tags that a well-formed response has, once each; none: the format is free."""
    answer: Literal["whole", "tags", "boxed", "line"] = "whole"
    """Where it has the answer: it is the whole response, between the last two tags, in the last
    `\\boxed{}`, or the last line, perhaps after a colon."""

    @field_validator("text")
    @classmethod
    def _has_a_question(cls, text: str) -> str:
        if text.count(QUESTION) != 1:
            raise ValueError(f"has {QUESTION} {text.count(QUESTION)} times; once is needed")
        return text

    @field_validator("answer")
    @classmethod
    def _has_tags(cls, answer: str, info: object) -> str:
        values = getattr(info, "data", {})
        if answer == "tags" and len(values.get("tags", ())) < 2:
            raise ValueError("an answer between tags needs two `tags` at least")
        return answer

    def ask(self, question: str) -> str:
        """The prompt. A question may have braces of its own."""
        return self.text.replace(QUESTION, question)


def _tagged(name: str, text: str, tags: tuple[str, ...] = _THINK) -> PromptTemplate:
    return PromptTemplate(name=name, text=text, tags=tags, answer="tags")


def _begun(name: str, text: str, tags: tuple[str, ...] = _THINK) -> PromptTemplate:
    """The prompt ends with the first tag, so three are left to the response."""
    return PromptTemplate(name=name, text=f"{text}\n{tags[0]}", tags=tags[1:], answer="tags")


TAGGED = (
    _tagged(
        "tags",
        "{question}\n\nWrite your reasoning between <think> and </think>, then the final answer "
        "alone between <answer> and </answer>.",
    ),
    _tagged(
        "tags_first",
        "You are given a problem. Reply in exactly two blocks: <think>how you get to the "
        "result</think><answer>the result</answer>.\n\nProblem: {question}",
    ),
    _tagged(
        "tutor",
        "A student asks a tutor: {question}\nThe tutor first works it out in private, inside "
        "<think> </think>, and then tells the student only the result, inside <answer> </answer>.",
    ),
    _tagged(
        "check",
        "{question}\n\nInside <think> </think>, solve this and check your result by another way. "
        "Inside <answer> </answer>, give what you are sure of, without further words.",
    ),
    _tagged(
        "reasoning",
        "Solve the following.\n{question}\n\nYour reply must have the form "
        "<reasoning>...</reasoning><solution>...</solution>; the second part holds nothing but "
        "the answer.",
        _REASON,
    ),
    _tagged(
        "steps",
        "{question}\n\nList numbered steps between <reasoning> and </reasoning>. Below them, put "
        "the answer between <solution> and </solution>.",
        _REASON,
    ),
)
BEGUN = (
    _begun(
        "begun",
        "{question}\n\nThink first; close your thoughts with </think>, and put the final answer "
        "between <answer> and </answer>. Your thoughts have begun:",
    ),
    _begun(
        "begun_short",
        "Problem: {question}\nThink in as few words as you can, end that with </think>, then give "
        "<answer>the result</answer>.",
    ),
    _begun(
        "begun_reasoning",
        "{question}\n\nContinue the reasoning that is opened below, end it with </reasoning>, and "
        "write the answer between <solution> and </solution>.",
        _REASON,
    ),
)
FREE = (
    PromptTemplate(name="plain", text="{question}\n\nReply with the answer only."),
    PromptTemplate(
        name="boxed",
        text="{question}\n\nReason step by step, and put the final answer within \\boxed{}.",
        answer="boxed",
    ),
    PromptTemplate(
        name="last_line",
        text="{question}\n\nExplain how you solve it. The last line of your reply has to be "
        "`Answer:` and the result.",
        answer="line",
    ),
    PromptTemplate(
        name="plan",
        text="Here is a task: {question}\nMake a plan, carry it out, and finish with "
        "\\boxed{} around the result.",
        answer="boxed",
    ),
)
TEMPLATES = (*TAGGED, *BEGUN, *FREE)


def chosen(templates: tuple[str | PromptTemplate, ...]) -> tuple[PromptTemplate, ...]:
    """Templates by name, or as given; all 13 if there are none.

    Raises:
        InvalidError: a name is unknown, or two have the same.
    """
    known = {builtin.name: builtin for builtin in TEMPLATES}
    templates_by_name: dict[str, PromptTemplate] = {}
    for choice in templates or TEMPLATES:
        if isinstance(choice, str) and choice not in known:
            raise InvalidError(f"template {choice[:64]!r} is unknown; known: {', '.join(known)}")
        template = known[choice] if isinstance(choice, str) else choice
        if template.name in templates_by_name:
            raise InvalidError(f"two templates are named {template.name!r}")
        templates_by_name[template.name] = template
    return tuple(templates_by_name.values())


class PromptAugmentationOptions(StrictModel):
    """Options of `prompt_augmentation`."""

    templates: tuple[str | PromptTemplate, ...] = Field(default=(), max_length=64)
    """Templates to draw from: names of built-in ones, or others with `name`, `text`, `tags` and
    `answer`; all built-in ones if empty."""
    evaluation: str = Field(default="", max_length=64)
    """Name of the template for held-out tasks; the first one if empty."""

    @model_validator(mode="after")
    def _can_be_used(self) -> Self:
        try:
            templates = chosen(self.templates)
        except InvalidError as error:
            raise ValueError(error.message) from None
        names = [template.name for template in templates]
        if self.evaluation and self.evaluation not in names:
            raise ValueError(
                f"evaluation {self.evaluation!r} is not among the templates; allowed: "
                + ", ".join(names)
            )
        return self
