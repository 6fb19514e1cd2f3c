from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.errors import AuthenticationError, InvalidError, PermissionDeniedError
from paceline.platform.transport.principal import (
    ALL_TENANTS,
    Principal,
    Role,
    caller,
    derived_token,
    new_token,
    principal_metadata,
    role_of,
    token_digest,
    token_id_of,
)

ANN = Principal(token_id="0123456789ab", name="ann", tenant="a", role=Role.SUBMIT, source="::1")
ROOT = Principal(token_id="", name="root", tenant=ALL_TENANTS, role=Role.ADMIN)


def test_each_role_includes_those_before_it() -> None:
    order = [Role.READ, Role.SUBMIT, Role.ADMIN]
    for i, role in enumerate(order):
        assert [role.covers(least) for least in order] == [j <= i for j in range(3)]


def test_a_role_that_does_not_exist_is_named() -> None:
    with pytest.raises(InvalidError, match=r"'root' is not a role; allowed: read, submit, admin"):
        role_of("root")


def test_tokens_are_found_by_their_shape_and_differ() -> None:
    (one, token), (other, _) = new_token(), new_token()
    assert one != other
    assert token_id_of(token) == one
    assert len(token.rpartition("_")[2]) == 64
    for wrong in ("", token[:-1], token + "0", token.upper(), f" {token}", f"{token}\n", "pl__"):
        assert token_id_of(wrong) == ""


def test_a_digest_and_a_derived_token_do_not_hold_the_token() -> None:
    secret = new_token()[1].rpartition("_")[2]
    assert len(token_digest(secret)) == 32
    assert derived_token(secret, "controller") == derived_token(secret, "controller")
    assert derived_token(secret, "controller") != derived_token(secret, "other")
    assert secret not in derived_token(secret, "controller")


def test_a_tenant_sees_its_own_resources_and_a_global_token_sees_all() -> None:
    assert (ANN.sees("a"), ANN.sees("b")) == (True, False)
    assert (ROOT.sees("a"), ROOT.sees("b")) == (True, True)
    assert [ANN.narrowed(tenant) for tenant in ("", "a", "b")] == ["a", "a", None]
    assert [ROOT.narrowed(tenant) for tenant in ("", "a")] == ["", "a"]


def test_a_refusal_names_what_is_not_allowed() -> None:
    ANN.check_role(Role.READ)
    ANN.check_tenant("a")
    with pytest.raises(PermissionDeniedError, match="needs the role admin; the token has submit"):
        ANN.check_role(Role.ADMIN)
    with pytest.raises(PermissionDeniedError, match=r"^tenant: 'b' is not the tenant"):
        ANN.check_tenant("b")


def test_a_principal_travels_in_the_metadata() -> None:
    context = SimpleNamespace(invocation_metadata=lambda: principal_metadata(ANN))
    assert caller(context) == ANN


def test_without_metadata_a_service_calls() -> None:
    assert caller(SimpleNamespace(invocation_metadata=lambda: None)).role is Role.ADMIN


@pytest.mark.parametrize("data", [b"\xff", b""])
def test_invalid_principal_metadata_is_refused(data: bytes) -> None:
    pairs = (("paceline-principal-bin", data),)
    with pytest.raises(AuthenticationError):
        caller(SimpleNamespace(invocation_metadata=lambda: pairs))
