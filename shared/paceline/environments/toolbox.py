"""Python functions that a policy may call: their schemas, and the answers to its calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from paceline.environments.tool_calls import MAX_CALLS, BadCall, Parser, ToolCall, hermes
from paceline.plugins import Message

MAX_ANSWER_CHARS = 8192
Function = Callable[..., str]


class Toolbox:
    """Functions by name; what a call returns is a message of the role `tool`.

    The first line of a function's docstring is its description, its annotated parameters are those
    of the tool. A call that cannot be read, of an unknown function, with wrong arguments or that
    raises `ValueError` is answered with what is wrong, so that the policy can do better.
    """

    def __init__(self, functions: Iterable[Function], *, parser: Parser = hermes) -> None:
        self._tools = {function.__name__: _Tool(function) for function in functions}
        self._parser = parser

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """All tools, for `Observation.tools`."""
        return tuple(tool.schema for tool in self._tools.values())

    def answers(self, turn: str) -> tuple[Message, ...]:
        """An answer to each call of a turn, in order; none if the turn has no calls."""
        return tuple(map(self._answer, self._parser(turn)[:MAX_CALLS]))

    def _answer(self, call: ToolCall | BadCall) -> Message:
        if isinstance(call, BadCall):
            return Message("tool", f"error: the call {call.problem}", name="error")
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools)
            text = f"error: no tool {call.name[:80]!r}; allowed: {known}"
            return Message("tool", text, name="error")
        return Message("tool", tool.call(call.arguments)[:MAX_ANSWER_CHARS], name=call.name)


class _Tool:
    """A function, its schema, and the check of its arguments."""

    def __init__(self, function: Function) -> None:
        plain = getattr(function, "__func__", function)
        self._function = function
        self._described = _describe(plain, is_method=plain is not function)
        self.schema = self._described.schema

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The function's result, or the problem as text."""
        try:
            parsed = self._described.model.model_validate(arguments)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4]]
            return f"error: {'; '.join(wrong)}"
        names = self._described.names.items()
        try:
            return self._function(**{name: getattr(parsed, field) for field, name in names})
        except ValueError as error:
            return f"error: {error}"


class _Untitled(GenerateJsonSchema):
    """Schemas without the titles that pydantic derives from names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never."""
        return False


@dataclass(frozen=True, slots=True)
class _Described:
    schema: Mapping[str, Any]
    model: type[BaseModel]  # of the arguments
    names: Mapping[str, str]  # of the parameters, by field of the model


@lru_cache(maxsize=256)
def _describe(function: Function, *, is_method: bool) -> _Described:
    """Kept, as a world makes its tools anew in each episode and models take milliseconds."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    parameters = list(inspect.signature(function).parameters.values())
    for index, parameter in enumerate(parameters[is_method:]):
        default = ... if parameter.default is parameter.empty else parameter.default
        # By alias, since a parameter may have a name that pydantic reserves.
        names[f"argument{index}"] = parameter.name
        fields[f"argument{index}"] = (
            hints.get(parameter.name, str),
            Field(default, alias=parameter.name),
        )
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    model = create_model(function.__name__, __config__=config, **fields)
    schema = model.model_json_schema(schema_generator=_Untitled)
    schema.pop("title", None)
    described = {
        "name": function.__name__,
        "description": (inspect.getdoc(function) or "").partition("\n")[0],
        "parameters": schema,
    }
    return _Described({"type": "function", "function": described}, model, names)
