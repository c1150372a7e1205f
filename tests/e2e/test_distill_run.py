"""On-policy distillation in a real run: a pupil comes closer to its teacher, and mistakes are one line."""

import re

import pytest
import torch
from support import SMALL, small_model

from dapo_rl import Config, DAPOTrainer
from dapo_rl.errors import UserError
from dapo_rl.models.save import save_model
from dapo_rl.models.tokenizer import build_tokenizer
from dapo_rl.runs.directory import RunDirectory

pytestmark = pytest.mark.slow
SETTINGS = (
    *SMALL, "sampling.dynamic=false", "train.steps=12", "train.warmup_steps=0", "train.lr=5e-4", "data.eval=null",
    "eval.every=null", "log.rollouts=false",
)  # fmt: skip
TEXTS = ("7-3=?\n7-3=4\nAnswer: 4", "2+9-4=?\n2+9=11\n11-4=7\nAnswer: 7", "8+8=?\n8+8=16\nAnswer: 16")


def trainer_for(path, *settings):
    return DAPOTrainer(config=Config.load("demo", [*SETTINGS, *settings]), run_dir=path)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The embedded model with noise in its weights: another opinion of the same tokens."""
    path = tmp_path_factory.mktemp("teacher")
    with trainer_for(path / "run") as trainer:
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in trainer.model.parameters():
                if weight.ndim == 2:
                    weight += 0.25 * weight.std() * torch.randn_like(weight)
        save_model(trainer.model, trainer.tokenizer, path / "model")
        return path / "model", logps(trainer)


@torch.no_grad()
def logps(trainer):
    """All log-probabilities along some texts."""
    ids = [torch.tensor([trainer.tokenizer(text).input_ids]) for text in TEXTS]
    return torch.cat([trainer.model(each).logits[0].log_softmax(-1) for each in ids])


def divergence(own, other):
    return (own.exp() * (own - other)).sum(-1).mean()


def test_a_pupil_comes_closer_to_its_teacher(teacher, tmp_path):
    path, of_teacher = teacher
    more = ("sampling.prompts_per_step=16", "sampling.max_new_tokens=56", "data.train.size=4096")
    with trainer_for(tmp_path / "run", "algo.advantage=distill", f"teacher.name={path}", *more) as trainer:
        before = divergence(logps(trainer), of_teacher)
        trainer.train()
        after = divergence(logps(trainer), of_teacher)
    assert after < 0.8 * before
    first = RunDirectory(tmp_path / "run").read_metrics()[0]
    assert first["teacher/kl"] > 0.03


def test_a_teacher_that_is_the_pupil_has_nothing_to_say(tmp_path):
    with trainer_for(tmp_path / "run", "algo.advantage=distill", "teacher.name=tiny", "train.steps=1") as trainer:
        trainer.train()
    (row,) = RunDirectory(tmp_path / "run").read_metrics()
    assert abs(row["teacher/kl"]) < 1e-5
    assert abs(row["actor/grad_norm"]) < 1e-3


@pytest.mark.parametrize("lora", [(), ("model.lora.rank=4",)])
def test_without_a_name_the_teacher_is_the_policy_as_the_run_starts(tmp_path, lora):
    """With the policy's own prompt it has nothing to say at first, also after a stop; with another it has."""
    own = ("algo.advantage=distill", "teacher.prompt='{prompt}'", *lora)
    with trainer_for(tmp_path / "run", *own, "train.steps=1") as trainer:
        trainer.train()
    (first,) = RunDirectory(tmp_path / "run").read_metrics()
    assert abs(first["teacher/kl"]) < 1e-5
    other = ("teacher.prompt='{prompt}{answer} {prompt}'", "algo.kl_coef=0.01", "train.steps=2", *lora)
    with trainer_for(tmp_path / "other", *other) as trainer:
        trainer.stop_requested = lambda: trainer._run.progress.step == 1
        trainer.train()
    with trainer_for(tmp_path / "other", *other) as trainer:
        trainer.train(resume=True)
    with trainer_for(tmp_path / "whole", *other) as trainer:
        trainer.train()
    rows, whole = (RunDirectory(tmp_path / name).read_metrics() for name in ("other", "whole"))
    assert abs(rows[0]["actor/kl_loss"]) < 0.01 < rows[0]["teacher/kl"]  # the reference reads the pupil's prompt
    assert [row["teacher/kl"] for row in rows] == [row["teacher/kl"] for row in whole]


def test_its_prompt_must_fit_into_its_context(tmp_path):
    with pytest.raises(UserError, match=r"^teacher\.prompt: .* exceeds the model's context of 512"):
        trainer_for(tmp_path / "run", f"teacher.prompt='{'1' * 500}{{prompt}}'").close()


def test_a_model_must_have_the_context_for_what_it_reads(tmp_path):
    """The demo's samples have at most 56 tokens after prompts of about 15; the pupil's own context is 512."""
    model, prompt = tmp_path / "short", f"teacher.prompt='{'1' * 40}{{prompt}}'"
    line = r"^teacher\.name: .*short has a context of (\d+) tokens, and it may have to read (\d+); name another, or "
    room = "sampling.max_new_tokens=56"
    for context, more in ((48, (room,)), (100, (room, prompt))):
        save_model(small_model(max_position_embeddings=context), build_tokenizer(), model)
        with pytest.raises(UserError, match=line) as error:
            trainer_for(tmp_path / "run", f"teacher.name={model}", *more).close()
        found, longest = map(int, re.match(line, str(error.value)).groups())
        assert found == context < longest
    trainer_for(tmp_path / "run", f"teacher.name={model}", room).close()  # without the longer prompt it fits


def test_rewards_and_a_teacher_add_up(tmp_path):
    """With a teacher that has nothing to say, the advantages are those of the rewards."""
    for name, settings in (("alone", ()), ("taught", ("teacher.name=tiny",))):
        with trainer_for(tmp_path / name, *settings, "train.steps=1") as trainer:
            trainer.train()
    rows = [RunDirectory(tmp_path / name).read_metrics()[0] for name in ("alone", "taught")]
    assert rows[0]["actor/grad_norm"] == pytest.approx(rows[1]["actor/grad_norm"], rel=1e-3)


def test_mistakes_are_one_line(tmp_path):
    other, words = tmp_path / "other", build_tokenizer()
    words.add_tokens(["<new>"])
    save_model(small_model(vocab_size=len(words)), words, other)
    for settings, line in (
        (["algo.advantage=distill"], r"^algo\.advantage: distill needs a teacher"),
        (["teacher.name=tiny", "algo.kl_coef=0.1"], r"^teacher\.name: with algo\.kl_coef the reference policy is"),
        (["teacher.name=tiny", "algo.advantage=gae"], r"^teacher\.name: a critic's advantages"),
        ([f"teacher.name={tmp_path / 'none'}"], r"^teacher\.name: "),
        ([f"teacher.name={other}"], r"^teacher\.name: .*other has another vocabulary than tiny"),
    ):
        with pytest.raises(UserError, match=line):
            trainer_for(tmp_path / "run", *settings).close()
    with pytest.raises(UserError, match=r"^sampling\.dynamic: with algo\.advantage=distill every group"):
        Config.load("demo", ["algo.advantage=distill", "teacher.name=tiny"])
