"""Runs whose engines are Ray actors: the run of one process, and the asynchronous one."""

import io
import json
import os
import signal

import pyarrow.parquet as pq
import pytest
import torch
from column_engine import check_rollouts
from support import REPOSITORY, THOROUGH, tokenizer
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, TrainerCallback

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cluster.ray_session import import_ray
from dapo_rl.cluster.weights_object_store import StoredWeights
from dapo_rl.runs.display import PlainDisplay

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_ranks", "warm_engines")]

ENGINES = ["cluster.backend=ray", "cluster.engines=2"]
SYNCHRONOUS = ["sampling.max_staleness=0", "train.steps=2"]


class AtStep(TrainerCallback):
    """Does something at the beginning of a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_begin(self, args, state, control, **others):
        if state.global_step + 1 == self.step:
            self.action()


def run(path, *settings, resume=False, kill_at=None):
    config = Config.load("demo", [*THOROUGH, "data.eval.size=8", *settings])
    with DAPOTrainer(config=config, run_dir=path, display=PlainDisplay(io.StringIO())) as trainer:
        if kill_at is not None:
            trainer.add_callback(AtStep(kill_at, lambda: kill(trainer._run.engine, 1)))
        return trainer.train(resume=resume)


def kill(pool, index):
    pid, _ = import_ray().get(pool._replicas[index].send("about"))
    os.kill(pid, signal.SIGKILL)


def metrics(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def groups(path):
    tables = [pq.read_table(file) for file in sorted((path / "rollouts").iterdir())]
    names = ["step", "draw", "sample", "prompt_id", "token_ids", "version_first", "version_last", "score", "fate"]
    return [table.select(names).to_pylist() for table in tables]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "run"
    run(path, *SYNCHRONOUS)
    return path


@pytest.mark.parametrize(
    ("settings", "stored"),
    [
        (["cluster.placement=separate", "cluster.ranks=2", "cluster.weights=broadcast"], 1),
        (["cluster.placement=shared", "cluster.ranks=2", "cluster.weights=direct"], 1),
    ],
)
def test_without_staleness_any_placement_gives_the_run_of_one_process(plain, tmp_path, monkeypatch, settings, stored):
    put, versions = StoredWeights.put, []
    monkeypatch.setattr(StoredWeights, "put", lambda version, *how: (versions.append(version), put(version, *how))[1])
    run(tmp_path / "run", *SYNCHRONOUS, *ENGINES, *settings)
    assert versions == list(range(stored))
    assert groups(tmp_path / "run") == groups(plain)
    for mine, other in zip(metrics(tmp_path / "run"), metrics(plain), strict=True):
        for name in {"eval/accuracy", "acc/mean", "actor/grad_norm", "rollout/mismatch_kl"} & other.keys():
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name


def test_an_asynchronous_run_adds_up_although_an_engine_is_killed_and_it_is_resumed(tmp_path):
    path = tmp_path / "run"
    settings = [*ENGINES, "cluster.placement=separate", "sampling.ahead=1", "eval.every=2", "checkpoint.every=1"]
    run(path, *settings, "train.steps=3", kill_at=2)
    summary = run(path, *settings, "train.steps=5", resume=True)
    assert summary["finished"]
    tokens = summary["tokens"]
    assert tokens["total"] == sum(count for name, count in tokens.items() if name != "total")
    rows = [row for table in groups(path) for row in table]
    seen = [(row["draw"], row["sample"]) for row in rows if row["fate"] != "carried"]
    assert len(set(seen)) == len(seen), "a sample was counted twice"
    kept = [row["draw"] for row in rows if row["fate"] == "kept"]
    assert kept == sorted(kept), "groups are admitted in the order drawn"
    decided = {row["draw"] for row in rows}
    in_flight = metrics(path)[-1]["sampling/in_flight"]
    assert len({*range(max(decided))} - decided) <= in_flight, "a group was lost"
    steps = [row for row in metrics(path) if row["step"] > 0]
    assert [row["sampling/kept"] >= 4 for row in steps] == [True] * 5
    assert max(row["sampling/staleness"] for row in steps) == 1
    assert any(row["sampling/in_flight"] + row["sampling/carried"] > 0 for row in steps)
    assert all(row[f"engine/{i}/version"] == row["step"] for row in steps for i in (0, 1))
    notes = [json.loads(line)["text"] for line in (path / "notes.jsonl").read_text().splitlines()]
    assert sum(note.startswith("engine 1 was lost: ") for note in notes) == 1


def test_columns_that_nobody_knows_cross_engine_and_rank_actors(tmp_path, monkeypatch):
    """From an engine's actor to the driver, to the loss on a rank's actor, and into the log. The file is relative to
    the directory of the driver; Ray's is another."""
    columns = "column_engine.py"
    monkeypatch.chdir(REPOSITORY / "tests")
    parts = [f"engine={columns}:ColumnEngine", f"algo.loss={columns}:loss", f"reward.verifier={columns}:odd"]
    shape = ["train.steps=1", "sampling.max_new_tokens=8", "overlong.shape=off", "data.eval=null", "eval.every=null"]
    run(tmp_path / "run", "cluster.backend=ray", "cluster.ranks=2", *parts, *shape)
    assert check_rollouts((tmp_path / "run" / "rollouts").iterdir()) > 0


def test_engines_have_what_the_files_of_a_model_have_beside_its_weights(tmp_path):
    """The biases of a router choose the experts, and are no weights."""
    words, shape = tokenizer(), {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 0, "moe_intermediate_size": 16}
    size = {"vocab_size": len(words), "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
    ends = {"eos_token_id": words.eos_token_id, "initializer_range": 0.3}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**shape, **experts, **size, **ends))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer)
    for part in (model, words):
        part.save_pretrained(tmp_path / "model")
    given = [f"model.name={tmp_path / 'model'}", "data.train=arithmetic", "engine=hf", "sampling.dynamic=false"]
    few = ["train.steps=1", "sampling.max_new_tokens=8", "overlong.shape=off", "data.eval=null", "eval.every=null"]
    run(tmp_path / "run", "cluster.backend=ray", *given, *few)
    assert abs(metrics(tmp_path / "run")[-1]["rollout/mismatch_kl"]) < 1e-6
