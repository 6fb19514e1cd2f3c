"""Reward `json_schema`: JSON that fits a schema."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from paceline.enums import ScoreStatus
from paceline.errors import InvalidError
from paceline.plugins import RewardInput, declares
from paceline.rewards.answers import RAW_CHARS, unanswered
from paceline.rewards.bounded import ExceededError, bounded
from paceline.rewards.schema_parts import check_parts
from paceline.types import Score

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
_SCHEMA_CHARS = 100_000
_ANSWER_CHARS = 2000


def checked(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema, if it is one (draft 2020-12, or what its `$schema` says).

    Raises:
        ValueError: it is none, one of its references leads nowhere, or one of its patterns is no
            regular expression.
    """
    if not isinstance(schema, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("a schema has to be an object")
    text = json.dumps(schema)
    if len(text) > _SCHEMA_CHARS:
        raise ValueError(f"a schema may have {_SCHEMA_CHARS} characters")
    if '"$ref": "http' in text or '"$dynamicRef": "http' in text:
        raise ValueError("schemas of other documents are not fetched: use $defs")
    from jsonschema.exceptions import SchemaError

    try:
        kind = _class_of(schema)
        kind.check_schema(schema)
        check_parts(schema, kind)
    except SchemaError as error:
        where = "/".join(map(str, error.absolute_path))
        raise ValueError(f"not a JSON schema: {where}: {error.message[:200]}") from None
    except RecursionError:
        raise ValueError("not a JSON schema: nested too deeply") from None
    except (AttributeError, TypeError):  # of a wrong $schema, or keywords of an old draft
        raise ValueError("not a JSON schema of a draft that is supported; use 2020-12") from None
    except OverflowError as error:  # of a pattern
        raise ValueError(f"not a JSON schema: {error}") from None
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(checked)]


def _load(**options: Any) -> None:
    del options
    import jsonschema  # noqa: F401  # pyright: ignore[reportUnusedImport]


@declares(load=_load)
def json_schema(
    item: RewardInput,
    *,
    schema: Schema | None = None,
    schema_field: str = "schema",
    parsed: Annotated[float, Field(ge=0, le=1)] = 0.0,
    max_chars: Annotated[int, Field(ge=100, le=4_000_000)] = 100_000,
    cpu_s: Annotated[float, Field(gt=0, le=60)] = 1.0,
) -> Score:
    """1 if the JSON in the response fits the schema, else 0.

    It is the last block fenced by three backticks, or all of the response. A response that is not
    JSON, is nested too deeply or longer than `max_chars`, is a `parse_error`; one that takes more
    than `cpu_s`, as patterns of a schema may, a `timeout`.

    Args:
        item: the payload of its task has the schema, if the options have none.
        schema: for all tasks. `$ref` works within it; no other document is fetched.
        schema_field: of the payload.
        parsed: reward of JSON that does not fit.
        max_chars: of a response.
        cpu_s: CPU time for a response.

    Raises:
        InvalidError: the task has no schema.
    """
    if len(item.response) > max_chars:
        return unanswered(item, f"more than {max_chars} characters")
    validator = _validator(json.dumps(schema) if schema is not None else _of(item, schema_field))
    fenced = _FENCED.findall(item.response)
    text: str = fenced[-1] if fenced else item.response
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return unanswered(item, f"not JSON: {type(error).__name__}: {error}")
    try:
        normal, problem = bounded(lambda: (_normal(value), _problem(validator, value)), cpu_s=cpu_s)
    except ExceededError as error:
        return unanswered(item, error.message, status=ScoreStatus.TIMEOUT)
    return Score(
        reward=parsed if problem else 1.0,
        parts={},
        raw_answer=text[:RAW_CHARS],
        normalised_answer=normal[:_ANSWER_CHARS],
        detail=problem,
    )


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _normal(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _problem(validator: Any, value: Any) -> str:
    try:
        error = next(validator.iter_errors(value), None)
    except OverflowError:  # of `multipleOf`
        return "a number is larger than any that it can be compared with"
    if error is None:
        return ""
    where = "/".join(map(str, error.absolute_path))
    return f"{where or 'the value'}: {error.message[:200]}"


def _of(item: RewardInput, field: str) -> str:
    payload: Any = json.loads(item.task.payload)
    schema: Any = payload.get(field) if isinstance(payload, dict) else None
    if isinstance(schema, str):  # as columns of data sets have it
        return schema
    if not isinstance(schema, dict):
        raise InvalidError(f"payload of task {item.task.task_id!r} has no schema in {field!r}")
    return json.dumps(schema)


@lru_cache(maxsize=1024)
def _validator(text: str) -> Any:
    from referencing import Registry

    try:
        schema = checked(json.loads(text))
    except ValueError as error:
        raise InvalidError(f"schema: {error}") from None
    return _class_of(schema)(schema, registry=Registry())  # which retrieves nothing


def _class_of(schema: Any) -> Any:
    from jsonschema.validators import Draft202012Validator, validator_for

    return validator_for(schema, default=Draft202012Validator)
