"""A critic that starts from a reward model, and value pre-training that ends by what the critic explains."""

import pytest
import torch
from reward_models import save_classifier, save_language_model
from support import SMALL, small_model, tokenizer

from dapo_rl import Config, DAPOTrainer
from dapo_rl.errors import UserError
from dapo_rl.models import save
from dapo_rl.models.values import value_model_from
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.train.critic import first_critic

pytestmark = pytest.mark.slow
SETTINGS = [
    *SMALL, "preset=vapo", "train.steps=6", "critic.pretrain_steps=5", "critic.lr=3e-3", "train.warmup_steps=2",
    "train.lr=1e-4", "data.eval=null", "eval.every=null", "checkpoint.every=1", "algo.proximal=recomputed",
]  # fmt: skip


def config_for(*settings):
    return Config.load("demo", [*SETTINGS, *settings])


def test_the_backbone_and_the_head_are_the_reward_model_s(tmp_path):
    reward_model = save_classifier(tmp_path / "rm", seed=5)
    critic = first_critic(small_model(), tokenizer(), config_for(f"critic.model={tmp_path / 'rm'}"))
    ids = torch.randint(5, len(tokenizer()), (2, 7))
    with torch.no_grad():
        hidden = critic.base_model(ids).last_hidden_state
        values = critic.get_output_embeddings()(hidden)[..., 0]
        scores = torch.stack([reward_model(ids[:, : n + 1]).logits[:, 0] for n in range(7)], 1)
    torch.testing.assert_close(values, scores, atol=1e-5, rtol=1e-5)
    assert all(parameter.requires_grad for parameter in critic.parameters())
    assert values.std() > 0


def test_without_one_it_expects_nothing():
    assert not first_critic(small_model(), tokenizer(), config_for()).get_output_embeddings().weight.any()


def test_other_models_are_refused_in_one_line(tmp_path):
    save_classifier(tmp_path / "wide", hidden_size=64)
    save_classifier(tmp_path / "deep", num_hidden_layers=3)
    save_classifier(tmp_path / "inner", intermediate_size=32)
    save_classifier(tmp_path / "three", labels=3)
    save_language_model(tmp_path / "lm")
    for name, line in (
        ("wide", "the head of LlamaForSequenceClassification is not a linear layer of the policy's width"),
        ("deep", "its weights are not those of the policy: layers.2"),
        ("inner", "layers.0.mlp.gate_proj.weight is"),
        ("three", "three has 3 labels"),
        ("lm", "lm has no classification head"),
        ("none", "no directory"),
    ):
        with pytest.raises(UserError, match=rf"^critic\.model: .*{line}") as error:
            first_critic(small_model(), tokenizer(), config_for(f"critic.model={tmp_path / name}"))
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="is not a linear layer"):
        value_model_from(small_model(), small_model())


def test_an_end_without_pretraining_is_refused():
    with pytest.raises(UserError, match=r"^critic\.pretrain_until: 0\.5 with critic\.pretrain_steps=0"):
        config_for("critic.pretrain_until=0.5", "critic.pretrain_steps=0")


def rows_of(path):
    return [
        {k: v for k, v in row.items() if not k.startswith(("timing", "perf")) and v == v}
        for row in RunDirectory(path).read_metrics()
    ]


@pytest.fixture(scope="module")
def explained(tmp_path_factory):
    """The explained variance of steps that train the critic alone."""
    path = tmp_path_factory.mktemp("vapo") / "run"
    with DAPOTrainer(config=config_for(), run_dir=path) as trainer:
        trainer.train()
    rows = rows_of(path)
    assert ["actor/lr" in row for row in rows] == [False] * 5 + [True]
    return [row["critic/vf_explained_var"] for row in rows]


def test_pretraining_ends_by_the_bound_and_resumes(explained, tmp_path):
    bound = max(explained[:3])
    first = next(step for step, value in enumerate(explained, 1) if value >= bound)
    settings = f"critic.pretrain_until={bound}"
    with DAPOTrainer(config=config_for(settings), run_dir=tmp_path / "whole") as trainer:
        trainer.train()
    whole = rows_of(tmp_path / "whole")
    assert ["actor/lr" in row for row in whole] == [step > first for step in range(1, 7)]
    rates = [row["actor/lr"] for row in whole if "actor/lr" in row]
    assert rates[:3] == pytest.approx([0.5e-4, 1e-4, 1e-5])  # its schedule is over the 3 steps that are left
    with DAPOTrainer(config=config_for(settings), run_dir=tmp_path / "killed") as trainer:
        trainer.stop_requested = lambda: trainer._built.progress.step >= first
        trainer.train()
    with DAPOTrainer(config=config_for(settings), run_dir=tmp_path / "killed") as trainer:
        trainer.train(resume=True)
    assert rows_of(tmp_path / "killed") == whole


def test_a_critic_that_cannot_be_copied_beside_the_policy_is_noted(tmp_path, monkeypatch):
    """Each checkpoint stops the run then."""
    with DAPOTrainer(config=config_for(), run_dir=tmp_path) as trainer:
        parameters = sum(weight.numel() for weight in trainer.model.parameters())
    monkeypatch.setattr(save, "host_memory", lambda: int(1.5 * (12 + 16) * parameters / 0.75))
    with DAPOTrainer(config=config_for(), run_dir=tmp_path) as trainer:
        assert [note for note in trainer._run.notes if "each checkpoint stops the run" in note]
        assert trainer._run.policy.save_note is None
