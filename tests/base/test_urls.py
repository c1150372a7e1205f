"""A password in a URL is refused before it shows anywhere."""

import pytest

from dapo_rl import Config, UserError
from dapo_rl.base.http_client import fault_of_url
from dapo_rl.base.urls import fault_of_credentials

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
