"""The settings of a run that goes on: the checkpoint's, whatever has become of config.yaml."""

import os

import pytest
import yaml

from dapo_rl.commands import _resumed_config
from dapo_rl.config import Config, known_keys
from dapo_rl.errors import UserError
from dapo_rl.runs.config_file import ConfigFile
from dapo_rl.runs.directory import RunDirectory, newest_run
from dapo_rl.train.checkpoint import Checkpoints

BEGUN = {"train.lr": 3e-5, "train.steps": 20, "algo.clip_high": 0.3, "data.eval": {"source": "arithmetic", "size": 9}}


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run", Config.build(BEGUN))


@pytest.fixture
def saved(run):
    """The run, with a checkpoint."""
    checkpoint(run, 2)
    return run


def checkpoint(run, step, config="its own"):
    config = run.read_config() if config == "its own" else config
    return Checkpoints(run.checkpoints_path, 5).save(step, [], config)


def resumed(run, *overrides, recipe=None):
    return _resumed_config(run.path, recipe, list(overrides))


def error_of(run, *overrides):
    with pytest.raises(UserError) as caught:
        resumed(run, *overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


def edit(run, old, new):
    text = run.config_path.read_text()
    assert text.count(old) == 1
    run.config_path.write_text(text.replace(old, new))


def test_nothing_has_changed(saved, run):
    config, notes = resumed(saved)
    assert config == Config.build(Config.build(BEGUN).resolved())
    assert notes == []
    config, notes = resumed(saved, "train.steps=30")
    assert config.train.steps == 30
    assert notes == []


def test_an_edited_setting_is_a_question(saved):
    edit(saved, "lr: 3.0e-05", "lr: 1e-4")
    path = saved.config_path
    assert error_of(saved) == (
        f"{path}: was edited: train.lr 3e-05 → 0.0001; give train.lr=0.0001 on the command line to change it, or copy "
        f"{saved.checkpoints_path}/step-2/config.yaml here to resume unchanged"
    )
    # The answers work.
    config, notes = resumed(saved, "train.lr=0.0001")
    assert (config.train.lr, config.train.steps, notes) == (1e-4, 20, [])
    path.write_bytes((saved.checkpoints_path / "step-2" / "config.yaml").read_bytes())
    assert resumed(saved)[0].train.lr == 3e-5


def test_an_edit_that_makes_another_run_says_so_at_once(saved):
    edit(saved, "clip_high: 0.3", "clip_high: 0.25")
    edit(saved, "keep: 2", "keep: 3")
    line = error_of(saved)
    edited = "was edited: algo.clip_high 0.3 → 0.25, checkpoint.keep 2 → 3"
    assert f"{edited}; algo.clip_high cannot change within a run" in line


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ("  steps: ten\n", "config.yaml: train.steps: input should be a valid integer"),
        ("  steps: 20\n  stesp: 30\n", "config.yaml: train.stesp: no such setting; did you mean train.steps?"),
    ],
)
def test_a_mistaken_edit_is_named(saved, new, said):
    edit(saved, "  steps: 20\n", new)
    assert said in error_of(saved)


def test_an_edit_of_the_form_alone_is_none(saved):
    text = saved.config_path.read_text()
    saved.config_path.write_text(f"# my best run\n{yaml.safe_dump(yaml.safe_load(text), sort_keys=True)}")
    assert resumed(saved) == (Config.build(Config.build(BEGUN).resolved()), [])


def lose(run):
    run.config_path.unlink()


def pipe(run):
    lose(run)
    os.mkfifo(run.config_path)


def device(run):
    lose(run)
    run.config_path.symlink_to("/dev/zero")


def loop(run):
    lose(run)
    run.config_path.symlink_to(run.config_path)


def directory(run):
    lose(run)
    run.config_path.mkdir()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lose, "is missing"),
        (lambda run: run.config_path.write_bytes(b""), "is empty"),
        (lambda run: run.config_path.write_bytes(b"# nothing\n{}\n"), "is empty"),
        (lambda run: run.config_path.write_bytes(b"\x89PNG\xff\x00" * 90), "it is not UTF-8 text"),
        (lambda run: run.config_path.write_bytes(b"\x00" * 2000), "not valid YAML"),
        (lambda run: run.config_path.write_bytes(b"train: [1, 2"), "config.yaml:1: not valid YAML"),
        (lambda run: run.config_path.write_bytes(b"- a list\n"), "not a list"),
        (pipe, "a pipe or a device"),
        (device, "a pipe or a device"),
        (loop, "is missing"),
        (directory, "Is a directory"),
    ],
)
def test_a_lost_file_is_told_and_the_checkpoint_has_the_settings(saved, harm, said):
    harm(saved)
    config, (note,) = resumed(saved, "train.steps=30")
    assert config == Config.build(Config.build(BEGUN | {"train.steps": 30, "checkpoint.every": 2}).resolved())
    assert said in note
    assert note.startswith(str(saved.config_path))
    assert note.endswith(f"; using the settings of {saved.checkpoints_path}/step-2")


def test_a_file_that_is_cut_anywhere_is_told_and_no_setting_becomes_its_default(saved):
    whole, expected = saved.config_path.read_bytes(), resumed(saved)[0]
    for end in range(0, len(whole), 41):
        saved.config_path.write_bytes(whole[:end])
        config, (note,) = resumed(saved)
        assert config == expected, end
        assert "using the settings of" in note


@pytest.mark.slow
def test_every_key_that_is_lost_is_told(saved):
    whole = yaml.safe_load(saved.config_path.read_text())
    for key in known_keys():
        settings = yaml.safe_load(yaml.safe_dump(whole))
        section, _, name = key.rpartition(".")
        level = settings.get(section, settings)
        if "lora." in key:
            continue
        del level[name]
        saved.config_path.write_text(yaml.safe_dump(settings))
        config, (note,) = resumed(saved)
        assert config == Config.build(Config.build(BEGUN).resolved())
        assert f"has no {key}; using" in note


def test_what_a_resumed_run_wrote_before_it_was_killed_counts(saved):
    """It was resumed with train.steps=30, and there is no checkpoint of that yet."""
    saved.write_config(Config.build(BEGUN | {"train.steps": 30}))
    config, (note,) = resumed(saved)
    assert config.train.steps == 30
    assert "train.steps 20 → 30" in note
    assert "using the new settings" in note


def test_the_settings_of_another_run_are_not_those_of_this_one(saved):
    saved.write_config(Config.build(BEGUN | {"algo.clip_high": 0.28}))
    assert "was started with different settings: algo.clip_high 0.3 → 0.28; start a new run" in error_of(saved)


def test_a_recipe_is_compared_with_the_checkpoint(saved, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(BEGUN | {"train.lr": 1e-5}))
    lose(saved)
    assert resumed(saved, recipe=recipe)[0].train.lr == 1e-5
    recipe.write_text(yaml.safe_dump(BEGUN | {"algo.clip_high": 0.2}))
    with pytest.raises(UserError, match=r"algo\.clip_high 0\.3 → 0\.2"):
        resumed(saved, recipe=recipe)


def test_the_newest_checkpoint_that_has_settings_has_the_say(saved):
    checkpoint(saved, 3, Config.build(BEGUN | {"train.steps": 25}))
    checkpoint(saved, 4, None)
    lose(saved)
    assert resumed(saved)[0].train.steps == 25
    (saved.checkpoints_path / "step-3" / "config.yaml").write_text("train.steps: 99\n")
    assert resumed(saved)[0].train.steps == 20


# Without a checkpoint, or with those of a version that did not keep settings in them.


@pytest.fixture(params=["no checkpoint", "an older checkpoint"])
def alone(run, request):
    if request.param != "no checkpoint":
        checkpoint(run, 2, None)
    return run


def test_a_whole_file_alone_is_enough(alone):
    assert resumed(alone) == (Config.build(Config.build(BEGUN).resolved()), [])
    text = alone.config_path.read_text()
    alone.config_path.write_text(text[: text.rindex("#")])  # as an older version wrote it
    assert resumed(alone) == (Config.build(Config.build(BEGUN).resolved()), [])


def test_a_file_alone_that_is_cut_is_an_error_that_names_what_is_lost(alone):
    whole = alone.config_path.read_bytes()
    for end in range(0, whole.index(b"rollouts: true"), 97):
        alone.config_path.write_bytes(whole[:end])
        assert str(alone.config_path) in error_of(alone)
    alone.config_path.write_bytes(whole[: whole.index(b"checkpoint:")])
    assert error_of(alone) == (
        f"{alone.config_path}: has no checkpoint.every and 16 more: it was cut off or edited; restore it from a copy, "
        "or give checkpoint.every=VALUE on the command line"
    )
    given = ["checkpoint={every: 2, keep: 2}", "log={rollouts: true, to: []}", "cluster={backend: null}"]
    assert resumed(alone, *given)[0] == Config.build(Config.build(BEGUN).resolved())


@pytest.mark.parametrize("key", ["train.lr", "algo.clip_high", "seed", "data.train", "model.lora"])
def test_a_key_that_is_lost_is_named(alone, key):
    settings = yaml.safe_load(alone.config_path.read_text())
    section, _, name = key.rpartition(".")
    del (settings[section] if section else settings)[name]
    alone.config_path.write_text(yaml.safe_dump(settings))
    assert f"has no {key}: it was cut off or edited" in error_of(alone)


def test_what_a_version_after_this_one_adds_is_no_loss(alone, monkeypatch):
    """A whole file without the key is of a version that did not have it."""
    older = Config.build(BEGUN).resolved()
    del older["sampling"]["skip_solved_epochs"]
    monkeypatch.setattr(Config, "resolved", lambda self: older)
    alone.write_config(Config())
    monkeypatch.undo()
    assert resumed(alone)[0].sampling.skip_solved_epochs == 0


def test_an_edit_that_nothing_contradicts_is_told(alone):
    edit(alone, "lr: 3.0e-05", "lr: 1e-4")
    config, (note,) = resumed(alone)
    assert config.train.lr == 1e-4
    assert note.endswith("was edited, and there is no checkpoint to compare it with; using it as it is")


def test_the_longest_recipe_makes_a_file_that_can_be_read(alone):
    config = Config.build(BEGUN | {"data.system_prompt": "\a\x85\n" * 70_000})
    alone.write_config(config)
    assert alone.read_config().resolved() == config.resolved()


def test_a_change_of_a_source_is_noticed_without_a_checkpoint(alone):
    assert "was started with different settings: data.train" in error_of(alone, "data.train.size=5")


def test_lost_for_good_is_one_line(run):
    checkpoint(run, 2, None)
    lose(run)
    assert error_of(run) == (
        f"{run.config_path}: is missing, and no checkpoint has the settings; restore it, or start a new run"
    )


# Directories.


def test_what_is_no_run_directory(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty").mkdir()
    assert "file: is not a directory" in error_of(RunDirectory(tmp_path / "file"))
    for name in ("loop", "empty", "nowhere", "file/below", "n" * 300):
        assert error_of(RunDirectory(tmp_path / name)), name
    with pytest.raises(UserError, match="no run here"):
        RunDirectory.open(tmp_path / "loop")


def test_a_directory_that_may_not_be_looked_into(run, monkeypatch):
    def refuse(*_arguments, **_named):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    assert "Permission denied" in error_of(run)


def test_the_newest_run_among_odd_entries(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    for wrong in ("missing", "a file", "empty"):
        if wrong == "a file":
            runs.write_text("")
        elif wrong == "empty":
            runs.unlink()
            runs.mkdir()
        with pytest.raises(UserError, match="there is no run in runs/"):
            newest_run()
    (runs / "file").touch()
    (runs / "loop").symlink_to("loop")
    (runs / "dangling").mkdir()
    (runs / "dangling" / "config.yaml").symlink_to("nowhere")
    (runs / "notes" / "checkpoints").mkdir(parents=True)
    older = RunDirectory.create(runs / "older", Config())
    os.utime(older.config_path, (1, 1))
    assert newest_run() == older.path.relative_to(tmp_path)
    lost = RunDirectory.create(runs / "lost", Config())
    checkpoint(lost, 1)
    lose(lost)
    assert newest_run().name == "lost"


def test_the_file_is_a_recipe_too(run):
    assert Config.load(run.config_path).resolved() == Config.build(BEGUN).resolved()
    assert ConfigFile.read(run.config_path).is_whole
