"""Uploads to a hub: the real client against a server that speaks enough of the hub's API."""

import pytest
import yaml
from small_hub import SmallHub, use_hub

from dapo_rl.errors import UserError
from dapo_rl.models.hub_upload import push_folder, write_card


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(range(256)))
    return model


@pytest.fixture
def with_card(folder):
    write_card(folder, "tiny")
    return folder


@pytest.mark.parametrize("private", [True, False, None])
def test_every_file_arrives_in_one_commit(with_card, monkeypatch, private):
    with SmallHub().serving() as hub:
        use_hub(monkeypatch, hub.address)
        address = push_folder(with_card, "someone/model", "Forty steps", private=private)
    assert address == f"{hub.address}/someone/model/commit/0123"
    (created,) = hub.created
    assert (created["name"], created["organization"]) == ("model", "someone")
    # The client says it in one of two ways, by its version.
    said = {"private": True, "public": False, None: None}[created.get("visibility")]
    assert created.get("private", said) is private
    ((path, message, files),) = hub.commits
    assert (path, message) == ("/api/models/someone/model/commit/main", "Forty steps")
    assert files == {path.name: path.read_bytes() for path in with_card.iterdir()}
    assert files.keys() == {"README.md", "config.json", "model.safetensors"}


def test_a_card_names_what_the_hub_can_find(folder):
    write_card(folder, "Qwen/Qwen2.5-0.5B", dataset_name="trl-lib/tldr", tags=["mine"])
    _, head, text = (folder / "README.md").read_text().split("---\n")
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "tags": ["dapo-rl", "dapo", "reinforcement-learning", "mine"],
        "base_model": "Qwen/Qwen2.5-0.5B",
        "datasets": ["trl-lib/tldr"],
    }
    assert text.strip() == "Trained with dapo-rl, by DAPO, from Qwen/Qwen2.5-0.5B."
    write_card(folder, "other/model")
    assert "other/model" not in (folder / "README.md").read_text()


def test_a_card_does_not_name_directories(folder):
    write_card(folder, str(folder), dataset_name="data/../train.jsonl")
    _, head, text = (folder / "README.md").read_text().split("---\n")
    assert yaml.safe_load(head).keys() == {"library_name", "tags"}
    assert text.strip() == "Trained with dapo-rl, by DAPO, from model."


def test_a_token_that_may_not_write_is_one_line_that_says_so(folder, monkeypatch):
    with SmallHub(status=403).serving() as hub:
        use_hub(monkeypatch, hub.address)
        with pytest.raises(UserError) as caught:
            push_folder(folder, "someone/model", "x")
    line = str(caught.value)
    assert line.startswith("push_to_hub: someone/model: the hub refused it: ")
    assert "You may not write here" in line
    assert line.endswith("with a token that may write there")
    assert "\n" not in line
    assert "hf_secret" not in line


def test_without_a_login(folder, monkeypatch):
    with SmallHub().serving() as hub:
        use_hub(monkeypatch, hub.address, token=None)
        with pytest.raises(UserError, match=r"^push_to_hub: someone/model: not logged in to http://127.* HF_TOKEN"):
            push_folder(folder, "someone/model", "x")
    assert hub.created == []


def test_without_a_network(folder, monkeypatch):
    use_hub(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"^push_to_hub: a/b: the hub cannot be reached: http://127.0.0.1:9: .*save_mo"):
        push_folder(folder, "a/b", "x")


def test_a_name_that_no_repository_can_have(folder, monkeypatch):
    with SmallHub().serving() as hub:
        use_hub(monkeypatch, hub.address)
        with pytest.raises(UserError, match=r"^push_to_hub: a b/c: is not the name of a repository: Repo id must"):
            push_folder(folder, "a b/c", "x")
