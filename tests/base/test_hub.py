"""The hub without a network: one line at once, and what is in the cache still loads."""

import shutil
import sys
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from huggingface_hub import constants

from dapo_rl.base.hub import cache_only, hub_problem
from dapo_rl.config import ModelSettings
from dapo_rl.errors import UserError
from dapo_rl.models.load import TINY, load_model

NOBODY = "http://127.0.0.1:9"


@pytest.fixture
def unreachable(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_an_endpoint_that_answers_is_reachable_whatever_it_answers(monkeypatch):
    class Refuses(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(403)

        def log_message(self, *words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Refuses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        assert hub_problem() is None
    finally:
        server.shutdown()
        server.server_close()


def test_the_reason_names_the_endpoint(unreachable, monkeypatch):
    assert hub_problem().startswith(f"{NOBODY}: ")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub_problem() == "HF_HUB_OFFLINE is set"


def test_a_hub_name_without_a_network_fails_at_once(unreachable, capfd):
    started = time.monotonic()
    with pytest.raises(UserError, match=r"^model\.name: someone/model is not in the cache, and the hub cannot be rea"):
        load_model(ModelSettings(name="someone/model", device="cpu"))
    assert time.monotonic() - started < 10
    assert capfd.readouterr().err == "", "no line for every retry"


def test_a_name_that_no_model_can_have_is_explained_as_such(unreachable):
    with pytest.raises(UserError, match=r"^model\.name: a/b/c cannot be loaded: Repo id must be in the form"):
        load_model(ModelSettings(name="a/b/c", device="cpu"))


def test_a_model_in_the_cache_loads_without_a_network(unreachable, tmp_path, monkeypatch):
    revision = "0" * 40
    model = tmp_path / "models--someone--model"
    shutil.copytree(TINY, model / "snapshots" / revision)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    started = time.monotonic()
    loaded, tokenizer = load_model(ModelSettings(name="someone/model", device="cpu"))
    assert time.monotonic() - started < 10
    assert (len(tokenizer), loaded.config.max_position_embeddings) == (261, 512)


def test_what_cache_only_changes_it_restores(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    with suppress(KeyError), cache_only():
        assert constants.HF_HUB_OFFLINE
        raise KeyError
    assert not constants.HF_HUB_OFFLINE
