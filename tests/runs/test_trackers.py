"""Metrics in trackers: what was logged is read back; what fails is left out, and said once."""

import math
import sqlite3
import struct
import sys
import time
from contextlib import closing

import pytest
from support import SMALL

from dapo_rl.config import Config
from dapo_rl.errors import UserError
from dapo_rl.runs.trackers import TRACKERS, Trackers, check_installed


@pytest.fixture
def notes():
    return []


def log_twice(name, run, notes):
    """Three steps, then a process that goes on after the second."""
    run.mkdir(exist_ok=True)
    for first, resumed_at, scale in ((1, 0, 1.0), (3, 2, 10.0)):
        trackers = Trackers([name], run, {"train": {"lr": 1e-6}}, resumed_at, notes.append)
        for step in range(first, first + 3):
            trackers.log(step, {"reward/mean": scale * step, "actor/kl": math.nan, "acc/mean": None})
        trackers.close()
        time.sleep(1.1 if name == "wandb" else 0)  # it names its directories by the second
    assert notes == []


def test_tensorboard_has_every_step_once(tmp_path, notes):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_twice("tensorboard", tmp_path / "run", notes)
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]


def test_tensorboard_is_written_while_the_run_goes_on(tmp_path, notes):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = Trackers(["tensorboard"], tmp_path, {}, 0, notes.append)
    trackers.log(1, {"reward/mean": 0.5})
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.5)]
    trackers.close()


def wandb_records(path):
    """The records of a .wandb file: LevelDB's log, in blocks of 32 KiB, after a header of 7 bytes."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    content, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        _, length, kind = struct.unpack_from("<IHB", content, place)
        if kind == 0:  # a block's padding
            place = -(-(place + 1) // 32768) * 32768
            continue
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_wandb_offline_has_every_step_in_one_run(tmp_path, notes, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_twice("wandb", tmp_path / "run", notes)
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.stem for file in files}) == 1
    values = []
    for file in files:
        for record in wandb_records(file):
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "reward/mean" in items:
                assert "actor/kl" not in items
                values.append((record.history.step.num, float(items["reward/mean"])))
    assert values == [(1, 1), (2, 2), (3, 3), (3, 30), (4, 40), (5, 50)]


def test_trackio_has_every_step_in_one_run(tmp_path, notes, monkeypatch):
    pytest.importorskip("trackio")
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio, trackio.utils, trackio.sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    log_twice("trackio", tmp_path / "run", notes)
    with closing(sqlite3.connect(tmp_path / "trackio" / "dapo-rl.db")) as database:
        rows = list(database.execute("select run_name, step, metrics from metrics order by id"))
    assert {name.rpartition("-")[0] for name, _, _ in rows} == {"run"}
    assert len({name for name, _, _ in rows}) == 1
    assert [step for _, step, _ in rows] == [1, 2, 3, 3, 4, 5]
    assert rows[-1][2] in ('{"reward/mean":50.0}', b'{"reward/mean":50.0}')


def test_a_tracker_that_cannot_start_is_left_out(tmp_path, notes):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file where the directory should be")
    trackers = Trackers(["tensorboard"], tmp_path, {}, 0, notes.append)
    trackers.log(1, {"reward/mean": 1.0})
    trackers.close()
    (note,) = notes
    assert note.startswith("log.trackers: tensorboard cannot start and is dropped: ")


def test_a_tracker_that_fails_later_is_left_out_and_the_others_go_on(tmp_path, notes, monkeypatch):
    logged = []

    class Recorder:
        def __init__(self, run, identity, settings, step):
            pass

        def log(self, step, metrics):
            logged.append((type(self).__name__, step))

        def close(self):
            pass

    class Breaks(Recorder):
        def log(self, step, metrics):
            super().log(step, metrics)
            if step == 2:
                raise ConnectionError("the server\nis gone")

    monkeypatch.setitem(TRACKERS, "wandb", Breaks)
    monkeypatch.setitem(TRACKERS, "trackio", Recorder)
    trackers = Trackers(["wandb", "trackio"], tmp_path, {}, 0, notes.append)
    for step in (1, 2, 3):
        trackers.log(step, {"reward/mean": 1.0})
    trackers.close()
    assert logged == [("Breaks", 1), ("Recorder", 1), ("Breaks", 2), ("Recorder", 2), ("Recorder", 3)]
    assert notes == ["log.trackers: wandb failed and is dropped: the server is gone; metrics.jsonl has everything"]


def test_a_tracker_that_is_not_installed_is_one_line_at_the_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"^log\.trackers: wandb cannot be imported .*pip install 'dapo-rl\[wandb\]'"):
        check_installed(["wandb"])


def test_one_name_is_a_list_of_one():
    assert Config.load(None, ["log.trackers=wandb"]).log.trackers == ("wandb",)
    assert Config.load(None, ["log.trackers=[tensorboard, trackio]"]).log.trackers == ("tensorboard", "trackio")
    assert Config.load(None, ["log.trackers=null"]).log.trackers == ()
    with pytest.raises(UserError, match=r"log\.trackers.*'tensorbord' is not one of .*; did you mean tensorboard\?"):
        Config.load(None, ["log.trackers=tensorbord"])


@pytest.mark.slow
def test_a_run_is_in_tensorboard_after_it_was_resumed(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from dapo_rl import DAPOTrainer
    from dapo_rl.cli import DEFAULT_RECIPE
    from dapo_rl.runs.directory import RunDirectory

    for steps in (2, 4):
        config = Config.load(DEFAULT_RECIPE, [*SMALL, f"train.steps={steps}", "log.trackers=tensorboard"])
        DAPOTrainer(config=config, run_dir=tmp_path / "run").train(resume=steps == 4)
    events = event_accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    log = RunDirectory(tmp_path / "run").read_metrics()
    assert [e.step for e in events.Scalars("eval/accuracy")] == [0, 2, 4]
    assert [e.step for e in events.Scalars("reward/mean")] == [1, 2, 3, 4]
    assert [e.value for e in events.Scalars("reward/mean")] == pytest.approx([row["reward/mean"] for row in log[1:]])
