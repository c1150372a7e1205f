"""Secrets in URLs, which error lines and files would show."""

from __future__ import annotations

import os
import re

from dapo_rl.errors import UserError

_VARIABLE = re.compile(r"\$\{(\w+)\}")


def fault_of_credentials(
    url: str, remedy: str = "leave it out, and name an environment variable that has the key in api_key_env"
) -> str:
    """The error for a URL with a user name or password, which it does not repeat; empty if the URL has none."""
    if "@" not in _authority(url):
        return ""
    return f"a user name or password in a URL would show in files and errors; {remedy}"


def has_open_password(url: str) -> bool:
    """Whether a URL has a password, or a token in its place, that is no environment variable."""
    name, colon, password = _authority(url).rpartition("@")[0].partition(":")
    return bool(_VARIABLE.sub("", password if colon else name))


def with_variables(url: str, key: str) -> str:
    """The URL with the values of environment variables in the places of `${NAME}`."""

    def value(found: re.Match[str]) -> str:
        if (given := os.environ.get(found[1])) is None:
            raise UserError(f"{key}: the environment variable {found[1]} is not set")
        return given

    return _VARIABLE.sub(value, url)


def _authority(url: str) -> str:
    return url.partition("://")[2].partition("/")[0].partition("?")[0].partition("#")[0]
