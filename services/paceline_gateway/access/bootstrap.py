"""The bootstrap token of the installation, with all rights, to create the other tokens with."""

from __future__ import annotations

from paceline.config import ServiceSettings
from paceline.errors import ConfigError
from paceline.platform.files import TOKEN_FILE, kept_secret
from paceline.platform.transport.principal import (
    ALL_TENANTS,
    Principal,
    Role,
    derived_token,
    new_bootstrap_token,
    token_digest,
)

MIN_CHARACTERS = 16


def bootstrap_token(settings: ServiceSettings) -> str:
    """The token of the settings, else that of the run directory, created at the first start.

    Raises:
        ConfigError: it is too short, or there is none and it cannot be stored.
    """
    if settings.token:
        return _long_enough(settings.token, "token", "make one with: openssl rand -hex 32")
    path = settings.run_dir / TOKEN_FILE
    try:
        stored = kept_secret(path, new_bootstrap_token)
    except OSError as error:
        raise ConfigError(
            f"token: is not set, and none can be kept in {path} ({error.strerror}); set it"
        ) from None
    return _long_enough(stored, f"token: the file {path}", "remove it and a new one is made")


def _long_enough(token: str, where: str, remedy: str) -> str:
    if len(token) >= MIN_CHARACTERS:
        return token
    raise ConfigError(
        f"{where}: has {len(token)} characters; at least {MIN_CHARACTERS} are needed; {remedy}"
    )


def own_tokens(token: str) -> dict[bytes, Principal]:
    """Principals of the installation's own tokens, which are not in the store, by digest."""
    admin = Principal(token_id="bootstrap", name="bootstrap", tenant=ALL_TENANTS, role=Role.ADMIN)
    # Submits the jobs of `TrainingJob` objects under its own name.
    controller = Principal(
        token_id="controller", name="controller", tenant=ALL_TENANTS, role=Role.SUBMIT
    )
    return {
        token_digest(token): admin,
        token_digest(derived_token(token, "controller")): controller,
    }
