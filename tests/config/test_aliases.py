"""Old spellings of settings are accepted wherever settings are read, with a notice."""

import pytest
import yaml

from dapo_rl.compat.trl.grpo_config import script_settings
from dapo_rl.config import Config, aliases, known_keys
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.plan import differences
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.runs.resume import config_to_resume

OLD = {"sampling.retire": 3, "log.to": "wandb", "checkpoint.last": False, "train.memory": "turns"}
OLD_WORDS = ["sampling.retire=3", "log.to=wandb", "checkpoint.last=false", "train.memory=turns"]


@pytest.fixture(autouse=True)
def notices(capsys):
    aliases._notice.cache_clear()
    yield lambda: capsys.readouterr().err.splitlines()
    aliases._notice.cache_clear()


def is_read(config):
    now = config.sampling.skip_solved_epochs, config.log.trackers, config.checkpoint.save_final, config.train.memory
    return now == (3, ("wandb",), False, "time_share")


def test_in_python_and_on_the_command_line(notices):
    assert is_read(Config.build(OLD))
    assert notices() == [
        "dapo: sampling.retire is called sampling.skip_solved_epochs now; the old name still works",
        "dapo: log.to is called log.trackers now; the old name still works",
        "dapo: checkpoint.last is called checkpoint.save_final now; the old name still works",
        "dapo: train.memory=turns is called train.memory=time_share now; the old name still works",
    ]
    assert is_read(Config.load(None, OLD_WORDS))
    assert is_read(Config.load(None, ["sampling={retire: 3}", *OLD_WORDS[1:]]))
    assert is_read(script_settings(None, OLD, None, lambda _: 1).config)
    assert notices() == [], "once per process"


def test_in_a_recipe_that_the_command_line_overrides(tmp_path):
    recipe = tmp_path / "old.yaml"
    recipe.write_text("sampling: {retire: 1}\nlog.to: wandb\ncheckpoint: {last: false}\ntrain.memory: turns\n")
    assert is_read(Config.load(recipe, ["sampling.skip_solved_epochs=3"]))
    assert is_read(Config.load(recipe, ["sampling.retire=2", "sampling.skip_solved_epochs=3"]))
    assert is_read(Config.load(recipe, ["sampling.skip_solved_epochs=2", "sampling.retire=3"]))


def test_config_yaml_of_an_earlier_version(tmp_path):
    run = RunDirectory.create(tmp_path / "run", Config.build({"train.steps": 5}))
    settings = yaml.safe_load(run.config_path.read_text())
    settings["sampling"]["retire"] = settings["sampling"].pop("skip_solved_epochs")
    settings["log"]["to"] = settings["log"].pop("trackers")
    settings["checkpoint"]["last"] = settings["checkpoint"].pop("save_final")
    settings["train"]["memory"] = "turns"
    run.config_path.write_text(yaml.safe_dump(settings))
    config, _ = config_to_resume(run.path, None, None, ["checkpoint.last=false"])
    assert (config.checkpoint.save_final, config.train.memory) == (False, "time_share")
    assert not differences(settings, config.resolved()), "an ablation of that version resumes"


def test_both_names_are_a_mistake(tmp_path):
    with pytest.raises(UserError, match=r"^log\.to: is called log\.trackers now, which is set too; keep one$"):
        Config.build({"log.to": "wandb", "log": {"trackers": "wandb"}})
    (tmp_path / "both.yaml").write_text("log: {to: wandb, trackers: wandb}\n")
    with pytest.raises(UserError, match=r"both\.yaml: log\.to: is called log\.trackers now"):
        Config.load(tmp_path / "both.yaml")


def test_only_the_new_names_are_shown():
    old = [name for name in aliases.ALIASES if "=" not in name]
    assert set(map(aliases.current_name, old)) <= set(known_keys())
    assert not set(old) & set(known_keys())
    assert not set(old) & {f"{section}.{name}" for section, values in Config().resolved().items()
                           if isinstance(values, dict) for name in values}  # fmt: skip
