"""A password in a URL is refused before it shows anywhere."""

import pytest

from dapo_rl import Config, UserError
from dapo_rl.base.http_client import fault_of_url
from dapo_rl.base.urls import fault_of_credentials, with_variables

WITH = ("http://user:s3cret@host:8000/v1", "https://s3cret@host", "http://user:s3cret@host?a=1")
WITHOUT = ("http://host:8000/v1", "http://host/@scope/v1", "http://host?to=a@b", "https://[::1]:8000/v1")


@pytest.mark.parametrize("url", [*WITH, "http://user:s3/cret@host:8000/v1", "http://user:s3cret@:x"])
def test_a_password_is_refused_and_not_shown(url):
    fault = fault_of_url(url)
    assert fault
    assert "s3" not in fault


@pytest.mark.parametrize("url", WITHOUT)
def test_an_address_without_one(url):
    assert fault_of_credentials(url) == fault_of_url(url) == ""


@pytest.mark.parametrize("url", WITH)
def test_a_teachers_address_in_a_recipe(url):
    with pytest.raises(UserError, match=r"^teacher\.name: a user name or password .* in api_key_env$") as caught:
        Config.build({"teacher.name": url})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", WITH)
def test_the_address_of_an_openenv_server(url):
    with pytest.raises(UserError, match=r"^env\.name: a user name or password .* OpenEnv servers take none$") as caught:
        Config.build({"env.name": f"openenv:{url}"})
    assert "s3cret" not in str(caught.value)


def test_environment_variables_stand_for_secrets(monkeypatch):
    monkeypatch.setenv("PASSWORD", "s3cret")
    assert with_variables("http://user:${PASSWORD}@host/mcp?$a", "env.mcp") == "http://user:s3cret@host/mcp?$a"
    with pytest.raises(UserError, match=r"^env\.mcp: the environment variable MISSING is not set$"):
        with_variables("http://user:${MISSING}@host", "env.mcp")
