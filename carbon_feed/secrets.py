"""Secrets are named, never written: `file:/run/secrets/key` or `env:NAME`, read anew at each use: they rotate."""

import os
from pathlib import Path

from pydantic import SecretStr

from trefoil.core import errors

FILE, ENVIRONMENT = "file:", "env:"
SECRET_BYTES_MAX = 4096


def checked(reference: SecretStr | None) -> SecretStr | None:
    """Refuse a secret that stands in the settings itself; for pydantic validators."""
    if reference is not None and not reference.get_secret_value().startswith((FILE, ENVIRONMENT)):
        raise ValueError("a secret must not stand in the settings: write file:/path or env:NAME")
    return reference


def resolve(reference: SecretStr | None, field: str) -> str:
    """The secret itself.

    Raises:
        errors.SettingError: none is configured, or the file or variable is absent or empty; never shows the secret.
    """
    if reference is None:
        raise errors.SettingError("no secret", field=field, remedy="name one: file:/path or env:NAME")
    named = reference.get_secret_value()
    if named.startswith(ENVIRONMENT):
        secret = os.environ.get(named.removeprefix(ENVIRONMENT), "")
    else:
        try:
            with Path(named.removeprefix(FILE)).open(encoding="utf-8") as file:
                secret = file.read(SECRET_BYTES_MAX)
        except (OSError, UnicodeDecodeError) as error:
            reason = type(error).__name__
            raise errors.SettingError(
                f"cannot be read ({reason})", field=field, value=named, remedy="name a readable text file"
            ) from error
    if not secret.strip():
        raise errors.SettingError("is empty", field=field, value=named, remedy="put the secret there")
    return secret.strip()
