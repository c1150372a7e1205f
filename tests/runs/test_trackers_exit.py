"""A tracker that ends the process, as a login that was refused may."""

import pytest

from dapo_rl.runs.trackers import TRACKERS, Trackers


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit()])
def test_a_tracker_that_exits_does_not_end_the_run(error, tmp_path, monkeypatch):
    def exits(*_):
        raise error

    notes = []
    monkeypatch.setitem(TRACKERS, "wandb", exits)
    Trackers(["wandb"], tmp_path, {}, 0, notes.append).log(1, {"reward/mean": 1.0})
    (note,) = notes
    assert note.startswith("log.trackers: wandb cannot start and is dropped: SystemExit")
