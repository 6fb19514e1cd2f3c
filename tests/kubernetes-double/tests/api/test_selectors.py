"""Selectors as predicates: equivalent forms agree."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubernetes_double.api.requests.errors import StatusError
from kubernetes_double.api.storage.selectors import (
    field_selector,
    label_selector,
    matches_labels,
)

KEYS, VALUES = st.sampled_from(["app", "tier", "x.dev/z"]), st.sampled_from(["a", "b", ""])
LABELS = st.dictionaries(KEYS, VALUES)


def labelled(labels: dict[str, str]) -> Any:
    return {"metadata": {"name": "n", "labels": labels}}


@given(LABELS, KEYS, VALUES)
def test_equality_is_a_set_of_one(labels: dict[str, str], key: str, value: str) -> None:
    obj = labelled(labels)
    assert label_selector(f"{key}={value}")(obj) is label_selector(f"{key} in ({value})")(obj)
    assert label_selector(f"{key}!={value}")(obj) is label_selector(f"{key} notin ({value})")(obj)


@given(LABELS, KEYS, VALUES)
def test_the_opposite_is_the_opposite(labels: dict[str, str], key: str, value: str) -> None:
    obj = labelled(labels)
    assert label_selector(f"{key}={value}")(obj) is not label_selector(f"{key}!={value}")(obj)
    assert label_selector(key)(obj) is not label_selector(f"!{key}")(obj)


@given(LABELS, LABELS)
def test_text_and_object_agree(labels: dict[str, str], wanted: dict[str, str]) -> None:
    text = ",".join(f"{key}={value}" for key, value in wanted.items())
    expected = matches_labels({"matchLabels": wanted}, labels)
    assert label_selector(text)(labelled(labels)) is expected


@given(LABELS, KEYS, st.sets(VALUES, min_size=1))
def test_expressions_agree_with_text(labels: dict[str, str], key: str, values: set[str]) -> None:
    for operator, word in (("In", "in"), ("NotIn", "notin")):
        one = {"key": key, "operator": operator, "values": list(values)}
        text = f"{key} {word} ({','.join(values)})"
        expected = matches_labels({"matchExpressions": [one]}, labels)
        assert label_selector(text)(labelled(labels)) is expected
    for operator, text in (("Exists", key), ("DoesNotExist", f"!{key}")):
        one = {"key": key, "operator": operator}
        expected = matches_labels({"matchExpressions": [one]}, labels)
        assert label_selector(text)(labelled(labels)) is expected


def test_no_selector_object_selects_nothing_and_an_empty_one_all() -> None:
    assert not matches_labels(None, {})
    assert matches_labels({}, {})


@pytest.mark.parametrize("text", ["a b", "a=b=c", "a in b", "=x", "a in (x) b"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(StatusError) as caught:
        label_selector(text)
    assert caught.value.code == 400


def test_fields_are_those_of_the_kind() -> None:
    pod = {"metadata": {"name": "n", "namespace": "x"}, "spec": {"hostNetwork": True}}
    assert field_selector("spec.hostNetwork=true,metadata.name=n", "pods")(pod)
    assert not field_selector("status.phase=Running", "pods")(pod)
    assert field_selector("status.phase=", "pods")(pod)
    with pytest.raises(StatusError, match="field label not supported"):
        field_selector("status.phase=Running", "configmaps")
    assert field_selector("spec.node=a", "trials.x", ("spec.node",))({"spec": {"node": "a"}})
