"""What the board reads of a critic: values and advantages of tokens, and the steps of value pre-training."""

import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from board_runs import ADVANTAGES, VALUES, credited, kept, make_critic_run, make_group, make_run
from fastapi.testclient import TestClient

from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.groups import group_of
from dapo_rl.board.launcher import Launcher
from dapo_rl.board.routes import create_app
from dapo_rl.board.run import BoardRun
from dapo_rl.runs.directory import GroupRow


def opened(run, draw, step=1):
    return group_of(BoardRun("a", run.path), run.rollout(step), draw)


def test_values_and_advantages_of_tokens(tmp_path):
    run = make_critic_run(tmp_path / "a", steps=3, pretrain_steps=1)
    group = opened(run, 10)
    assert group["colours"] == ["logp", "ratio", "clipped", "entropy", "value"]
    for sample in group["samples"]:
        assert (sample["value"], sample["advantages"]) == (list(VALUES), list(ADVANTAGES))
        assert sample["advantage"] == pytest.approx(sum(ADVANTAGES) / 3)
    assert opened(run, 11)["fate"] == "kept"  # all right, and yet trained on
    client = TestClient(create_app(Catalogue([tmp_path]), Launcher(tmp_path), "token"), base_url="http://127.0.0.1")
    assert client.get("/api/group?run=a&step=1&draw=10").json()["samples"][0]["value"] == list(VALUES)
    # Their lists are no columns of the downloads, and not unknown ones either.
    header, *_ = client.get("/api/rows.csv?run=a&step=1").text.splitlines()
    assert header.endswith(",prompt,response,messages")


def test_values_of_tokens_that_share_a_character_and_of_an_environment(tmp_path):
    """A piece has the value before its first token, and the largest advantage of its tokens."""
    run = make_run(tmp_path / "a", steps=1, **{"model.name": "elsewhere"})
    row = credited(kept(make_group(1, [("2", True)])))
    (sample,) = row.group.samples
    masked = sample.replace(mask=np.array([True, True, False]))
    run.write_rollouts(1, [replace(row, group=replace(row.group, samples=(masked,)))], None)
    (read,) = opened(run, 1)["samples"]
    assert (read["value"], read["advantages"]) == ([-0.5, 0.25, None], [0.5, 0.375, None])
    (tmp_path / "a" / "model").mkdir()
    tokenizer = {
        "version": "1.0",
        "model": {"type": "BPE", "vocab": {"a": 0, "Ã": 5, "¤": 6, "b": 7}, "merges": []},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
    }
    (tmp_path / "a" / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (read,) = opened(run, 1)["samples"]
    assert read["pieces"] == [["ä", 2], ["b", 1]]
    assert (read["value"], read["advantages"]) == ([-0.5, None], [0.5, None])


def test_groups_without_a_critic_and_files_of_older_versions(tmp_path):
    run = make_run(tmp_path / "a", steps=1)
    path = run.rollout(1)
    group = opened(run, 10)
    assert group["colours"] == ["logp", "ratio", "clipped", "entropy"]
    older = pq.read_table(path).drop_columns(["values", "advantages"])
    pq.write_table(older, path)
    assert opened(run, 10) == group
    # Of a step with a critic, the groups that were dropped.
    run.write_rollouts(
        1, [credited(kept(make_group(1, [("2", True)]))), GroupRow(make_group(2, [("2", True)]), "stale")]
    )
    assert "value" in opened(run, 1)["samples"][0]
    assert not {"value", "advantages"} & set(opened(run, 2)["samples"][0])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[math.nan, math.inf, -1e30]] * 2, [None, None, -1e30]),
        ([[0.5]] * 2, [0.5, None, None]),  # of fewer tokens
        ([[0.1, 0.2, 0.3, 0.4]] * 2, [0.1, 0.2, 0.3]),
        ([["x", "0.5", None]] * 2, None),
        ([[], []], None),
        ([None, None], None),
        ([1.0, 2.0], None),
    ],
)
def test_values_that_no_run_writes(tmp_path, values, expected):
    run = make_run(tmp_path / "a", steps=1)
    run.write_rollouts(1, [credited(kept(make_group(1, [("2", True), ("3", False)])))], None)
    table = pq.read_table(run.rollout(1))
    for name in ("values", "advantages"):
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    pq.write_table(table, run.rollout(1))
    for sample in opened(run, 1)["samples"]:
        assert sample.get("value") == sample.get("advantages") == (expected and pytest.approx(expected))


def test_the_row_has_the_steps_of_value_pretraining(tmp_path):
    run = make_critic_run(tmp_path / "a", steps=8)
    assert BoardRun("a", run.path).row()["pretrain_steps"] == 2
    settings = yaml.safe_load(run.config_path.read_text())
    settings["critic"]["pretrain_steps"] = "many"
    run.config_path.write_text(yaml.safe_dump(settings))
    assert BoardRun("a", run.path).row()["pretrain_steps"] is None
    # By default a quarter of the steps, resolved in config.yaml.
    assert BoardRun("b", make_run(tmp_path / "b", 8, preset="vapo").path).row()["pretrain_steps"] == 1
    # Without a critic the setting means nothing.
    plain = make_run(tmp_path / "c", 8, **{"critic.pretrain_steps": 3})
    assert BoardRun("c", plain.path).row()["pretrain_steps"] is None
