"""The page's words and colours come from Python's tables."""

from fastapi.testclient import TestClient

from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.launcher import Launcher
from dapo_rl.board.routes import create_app
from dapo_rl.lab.ablate.techniques import TECHNIQUES
from dapo_rl.outcomes import OUTCOMES


def client(tmp_path):
    app = create_app(Catalogue([tmp_path]), Launcher(tmp_path), "token")
    return TestClient(app, base_url="http://127.0.0.1:8765")


def test_the_outcomes(tmp_path):
    answer = client(tmp_path).get("/api/vocabulary").json()["outcomes"]
    assert [outcome["key"] for outcome in answer] == list(OUTCOMES)
    assert answer[0] == {
        "key": "kept",
        "label": "trained on",
        "tint": "#2a9d6f",
        "role": "good",
        "why": "The rewards of its samples differ: it was trained on.",
    }
    roles = {outcome["key"]: outcome["role"] for outcome in answer}
    assert (roles["carried"], roles["verifier_error"], roles["stale"]) == ("calm", "bad", "dropped")


def test_the_techniques(tmp_path):
    answer = client(tmp_path).get("/api/lab").json()["techniques"]
    assert [(each["name"], each["meaning"]) for each in answer] == [(t.name, t.meaning) for t in TECHNIQUES]
    assert all(technique.meaning for technique in TECHNIQUES)
