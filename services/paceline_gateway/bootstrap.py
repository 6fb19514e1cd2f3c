"""The first token: of the installation, for everything, so that others can be made with it."""

from __future__ import annotations

from paceline.access import ALL_TENANTS, Principal, Role, derived, digest_of, new_bootstrap
from paceline.config import ServiceSettings
from paceline.errors import ConfigError
from paceline.files import TOKEN_FILE, kept_secret

LEAST_CHARACTERS = 16


def bootstrap_token(settings: ServiceSettings) -> str:
    """The token of the settings, else that of the run directory, made at the first start.

    Raises:
        ConfigError: it is too short, or there is none and it cannot be kept.
    """
    if settings.token:
        return _long_enough(settings.token, "token", "make one with: openssl rand -hex 32")
    path = settings.run_dir / TOKEN_FILE
    try:
        kept = kept_secret(path, new_bootstrap)
    except OSError as error:
        raise ConfigError(
            f"token: is not set, and none can be kept in {path} ({error.strerror}); set it"
        ) from None
    return _long_enough(kept, f"token: the file {path}", "remove it and a new one is made")


def _long_enough(token: str, where: str, remedy: str) -> str:
    if len(token) >= LEAST_CHARACTERS:
        return token
    raise ConfigError(
        f"{where}: has {len(token)} characters; at least {LEAST_CHARACTERS} are needed; {remedy}"
    )


def own_tokens(token: str) -> dict[bytes, Principal]:
    """What opens the door beside the tokens in the store, by digest."""
    admin = Principal(token_id="bootstrap", name="bootstrap", tenant=ALL_TENANTS, role=Role.ADMIN)
    # Submits what is asked for by `TrainingJob` objects, under a name of its own.
    controller = Principal(
        token_id="controller", name="controller", tenant=ALL_TENANTS, role=Role.SUBMIT
    )
    return {digest_of(token): admin, digest_of(derived(token, "controller")): controller}
