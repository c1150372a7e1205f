"""Secrets in URLs, which error lines and files would show."""

from __future__ import annotations


def fault_of_credentials(url: str) -> str:
    """The error for a URL with a user name or password, which it does not repeat; empty if the URL has none."""
    place = url.partition("://")[2]
    if "@" not in place.partition("/")[0].partition("?")[0].partition("#")[0]:
        return ""
    return (
        "a user name or password in a URL would show in files and errors; leave it out, and name an environment "
        "variable that has the key in api_key_env"
    )
