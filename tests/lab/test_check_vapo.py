"""`dapo check` of recipes with a critic: the VAPO paper, component by component."""

import io
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dapo_rl.cli import app
from dapo_rl.config import Config, known_keys
from dapo_rl.errors import UserError
from dapo_rl.lab.check import conformance, print_conformance
from dapo_rl.lab.papers import PAPERS, find_paper

PAPER = {
    "preset": "vapo",
    "model.name": "Qwen/Qwen2.5-32B",
    "data.train": "BytedTsinghua-SIA/DAPO-Math-17k",
    "data.eval": "data/aime-2024.parquet",
    "data.max_prompt_tokens": 2048,
    "sampling.prompts_per_step": 512,
    "sampling.group_size": 16,
    "sampling.max_new_tokens": 20480,
    "overlong.cache_length": 4096,
    "critic.pretrain_steps": 50,
    "train.steps": 363,
    "train.mini_batches": 16,
    "train.lr": 1e-6,
    "eval.samples": 32,
    "eval.top_p": 0.7,
}


def check(paper=None, **changes):
    config = Config.build(PAPER | {key.replace("__", "."): value for key, value in changes.items()})
    return conformance(config, paper=paper)


def different(report):
    return {row.component for row in report.rows if not row.same}


def row_of(report, component):
    (row,) = (row for row in report.rows if row.component == component)
    return row


def test_the_papers_recipe_is_conformant_in_every_row():
    report = check()
    assert different(report) == set()
    assert (report.paper, report.arxiv, report.why) == ("VAPO", "2504.05118", "the recipe has a critic")
    assert report.verdict == "conformant: every row matches the paper"
    for row in report.rows:
        named = {"Training prompts", "Held-out prompts"}
        assert row.recipe.lower().endswith(row.paper.lower()) or row.component in named | {
            "Warm-up",
            "Length of the run",
        }
    # 512 prompts × 16 samples in mini-batches of 512, of which the first 50 steps train the critic alone.
    numbers = report.arithmetic
    assert (numbers.samples_per_step, numbers.samples_per_update, numbers.pretrain_steps) == (8192, 512, 50)
    assert numbers.total_updates == (363 - 50) * 16 == 5008


def test_the_preset_is_vapo_and_ppo_lacks_five_of_its_techniques():
    assert conformance(Config.build({"preset": "vapo"})).verdict.startswith("algorithm conformant, ")
    report = check(preset="ppo", critic__pretrain_steps=0)
    lacks = "Value pre-training, Decoupled GAE, Length-adaptive GAE, Clip-Higher, Positive-example LM loss"
    assert report.verdict == f"not VAPO: {lacks}"
    scores = [re.search(r"without it has (\d+) instead of 60", row.meaning) for row in report.rows if not row.same]
    assert [int(score[1]) for score in scores if score] == [11, 33, 45, 46, 54]
    settings = {row.component for row in report.rows if not row.same and row.kind == "settings"}
    assert settings == {"Value clip", "Whitening", "Clip bounds", "Soft Overlong Punishment", "Length of the run"}


FLIPS = [
    ("critic.pretrain_steps", 0, {"Value pre-training", "Length of the run"}),
    ("critic.pretrain_steps", 20, {"Pre-training steps", "Length of the run"}),
    ("critic.lambda_critic", 0.95, {"Decoupled GAE"}),
    ("critic.lambda_policy", 0.95, {"Length-adaptive GAE"}),
    ("critic.lambda_policy", 1.0, {"Length-adaptive GAE", "Decoupled GAE"}),
    ("critic.length_alpha", 0.1, {"Length alpha"}),
    ("critic.lambda_lowest", 0.5, {"Length alpha"}),
    ("critic.model", "rm", set()),
    ("critic.pretrain_until", 0.5, set()),
    ("critic.lambda_lowest", 1.0, {"Length alpha"}),
    ("critic.value_clip", 0.2, {"Value clip"}),
    ("critic.whiten", True, {"Whitening"}),
    ("critic.lr", 1e-5, {"Critic's learning rate"}),
    ("critic.lr", 2e-6, set()),
    ("algo.positive_lm_coef", 0.0, {"Positive-example LM loss"}),
    ("algo.positive_lm_coef", 0.5, {"LM loss weight"}),
    ("algo.clip_high", 0.2, {"Clip-Higher", "Clip bounds"}),
    ("algo.aggregation", "seq-mean-token-mean", {"Token-level loss"}),
    ("algo.aggregation", "token-mean-per-group", {"Token-level loss"}),
    ("algo.loss", "gspo", {"Objective"}),
    ("algo.kl_coef", 0.001, {"KL term"}),
    ("algo.normalize", "none", set()),  # the critic is the baseline
    ("sampling.dynamic", True, {"Dynamic Sampling", "Surplus groups"}),
    ("sampling.filter", "mine.py:keep", {"Dynamic Sampling"}),
    ("sampling.min_p", 0.1, {"Truncated sampling"}),
    ("model.lora.rank", 8, {"LoRA"}),
    ("train.steps", 10_000, {"Length of the run"}),
    ("sampling.group_size", 1, {"Group-Sampling", "Group size", "Updates per step"}),
    ("sampling.group_size", 8, {"Group size", "Updates per step"}),
    ("sampling.prompts_per_step", 256, {"Prompts per step", "Updates per step"}),
    ("overlong.shape", "off", {"Soft Overlong Punishment"}),
    ("train.lr", 1e-5, {"Learning rate", "Critic's learning rate"}),
    ("train.warmup_steps", 0, {"Warm-up"}),
    ("train.warmup_steps", 100, set()),  # the paper does not state how many
    ("reward.wrong", 0.0, {"Rule-based reward"}),
    ("eval.top_p", 1.0, {"Held-out sampling"}),
]
FOLLOWS = {"Length of the run", "Updates per step", "Critic's learning rate", "Surplus groups"}
"""Rows that follow from keys of other rows too."""


@pytest.mark.parametrize(("key", "value", "components"), FLIPS, ids=[f"{k}={v}" for k, v, _ in FLIPS])
def test_a_switch_changes_the_rows_it_belongs_to_and_no_other(key, value, components):
    report = conformance(Config.build(PAPER | {key: value}))
    assert different(report) == components
    for row in report.rows:
        if not row.same:
            assert row.meaning
            assert row.recipe != row.paper
            assert key in row.keys or row.component in FOLLOWS


@pytest.mark.parametrize(
    ("changes", "component", "words"),
    [
        ({"critic__pretrain_steps": 10}, "Pre-training steps", "^1/5 of the paper's; .*vf_explained_var settle$"),
        (
            {"train__steps": 40, "critic__pretrain_steps": None},
            "Pre-training steps",
            "by default it is an eighth of train.steps",
        ),
        # 0.95^100 = 0.0059
        ({"critic__lambda_policy": 0.95}, "Length-adaptive GAE", r"^0\.6% of the reward is left 100 tokens before"),
        # 1 / (0.05 × (1 − 0.9)) = 200
        ({"critic__lambda_lowest": 0.9}, "Length alpha", "so responses below 200 tokens share it"),
        ({"sampling__max_new_tokens": 100, "overlong__cache_length": 20}, "Length alpha", "up to 20 tokens"),
        ({"critic__lr": 5e-6}, "Critic's learning rate", r"^2\.5 times the paper's; 5 times the policy's instead of"),
        ({"train__lr": 1e-5}, "Critic's learning rate", "^10 times the paper's; twice the policy's, as in the paper$"),
        (
            {"reward__wrong": 0.0},
            "Rule-based reward",
            r"not divided by the std, so they are 0\.5 times as large; .*100%",
        ),
        ({"reward__wrong": 0.0, "critic__whiten": True}, "Rule-based reward", "same for any two values once divided"),
        ({"algo__kl_coef": 0.1, "algo__kl_in": "reward"}, "KL term", "pulled towards the initial model"),
        ({}, "Critic", "starts from the policy's weights; the paper's from a reward model"),
        ({}, "Length alpha", "^$"),
    ],
)
def test_meanings_are_about_the_value(changes, component, words):
    assert re.search(words, row_of(check(**changes), component).meaning)


def test_kl_in_the_reward_is_named():
    assert row_of(check(algo__kl_coef=0.1, algo__kl_in="reward"), "KL term").recipe == "k3 in the reward, weight 0.1"


def test_every_key_of_the_critic_is_named():
    named = {key for component in PAPERS["vapo"].rows for key in component.keys}
    assert named <= set(known_keys())
    assert {key for key in known_keys() if key.startswith("critic.")} <= named


def test_the_paper_can_be_chosen():
    dapo = Config.build({"preset": "dapo"})
    assert (find_paper(dapo).name, find_paper(dapo, "VAPO").name) == ("DAPO", "VAPO")
    report = conformance(dapo, paper="vapo")
    assert (report.why, report.verdict) == ("", "not VAPO: Critic, Positive-example LM loss, Dynamic Sampling")
    assert not {row.component for row in report.rows} & {"Value pre-training", "Decoupled GAE", "Whitening"}
    assert check("dapo").verdict == "not DAPO: LM loss of correct samples, Advantage, Dynamic Sampling"
    with pytest.raises(UserError, match=r"^--paper: 'vap' is not one of dapo, vapo; did you mean vapo\?$"):
        find_paper(dapo, "vap")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_report_says_which_paper_and_fits_80_columns(encoding):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    print_conformance(check("dapo", preset="ppo", critic__pretrain_steps=0), Console(file=stream, width=80))
    print_conformance(check(preset="ppo", critic__pretrain_steps=0), Console(file=stream, width=80))
    stream.flush()
    output = raw.getvalue().decode()
    assert max(len(line) for line in output.splitlines()) <= 80
    words = " ".join(output.split())
    assert words.startswith("Compared with DAPO (arXiv 2503.14476) ")
    assert "Compared with VAPO (arXiv 2504.05118), as the recipe has a critic; for DAPO: --paper dapo" in words
    assert "steps of value pre-training" not in words


def test_the_command_takes_a_paper():
    result = CliRunner().invoke(app, ["check", "demo", "preset=vapo", "--paper", "dapo"])
    assert result.exit_code == 0
    assert result.output.startswith("Compared with DAPO (arXiv 2503.14476)\n")
    result = CliRunner().invoke(app, ["check", "demo", "preset=vapo"])
    assert re.search(r"steps of value pre-training, for the critic alone +5\n", result.output)
    assert re.search(r"  critic +\S+ MiB  0%  weights, gradients and adamw", result.output)
