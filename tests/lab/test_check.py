import io
import json
import re

import pytest
from rich.console import Console

from dapo_rl.config import Config, known_keys
from dapo_rl.errors import UserError
from dapo_rl.lab.check import BatchArithmetic, conformance, conformance_json, print_conformance
from dapo_rl.lab.papers import IRRELEVANT, PAPERS
from dapo_rl.lab.papers.facts import DERIVED, RecipeFacts

PAPER = {
    "model.name": "Qwen/Qwen2.5-32B",
    "data.train": "BytedTsinghua-SIA/DAPO-Math-17k",
    "data.eval": "data/aime-2024.parquet",
    "reward.correct": 1.0,
    "reward.wrong": -1.0,
    "data.max_prompt_tokens": 2048,
    "sampling.prompts_per_step": 512,
    "sampling.group_size": 16,
    "sampling.max_new_tokens": 20480,
    "sampling.surplus": "drop",
    "overlong.max_length": 20480,
    "overlong.cache_length": 4096,
    "train.steps": 625,
    "train.mini_batches": 16,
    "train.lr": 1e-6,
    "train.warmup_steps": 20,
    "eval.samples": 32,
    "eval.top_p": 0.7,
}


def check(**changes):
    return conformance(Config.build(PAPER | {key.replace("__", "."): value for key, value in changes.items()}))


def different(report):
    return {row.component for row in report.rows if not row.same}


def test_the_papers_recipe_is_conformant_in_every_row():
    report = check()
    assert different(report) == set()
    assert report.verdict == "conformant: every row matches the paper"
    references = {row.component: row.reference for row in report.rows}
    assert {name: references[name] for name in list(references)[:7]} == {
        "Objective": "Eq. 8",
        "Ratio": "Eq. 9",
        "Advantage": "Eq. 9",
        "Clip-Higher": "Eq. 10",
        "Dynamic Sampling": "Eq. 11",
        "Batch filling": "Algorithm 1",
        "Token-level loss": "Eq. 12",
    }
    assert references["Soft Overlong Punishment"] == references["Punishment interval"] == "Eq. 13"
    assert references["Rule-based reward"] == "Eq. 7"
    for row in report.rows:
        assert row.recipe.lower().endswith(row.paper.lower()) or row.component in {
            "Advantage",  # says its ddof
            "Batch filling",  # says its N
            "Overlong Filtering",
            "Cap on draws",
            "Training prompts",
            "Held-out prompts",
        }


FLIPS = [
    ("env.name", "mine.py:Wordle", {"Environment", "Rule-based reward"}),
    ("env.options", {"size": 3}, {"Environment"}),
    ("env.tools", ["mine.py:search"], {"Environment"}),
    ("env.mcp", ["server"], {"Environment"}),
    ("env.agent", "mine.py:solve", {"Environment", "Rule-based reward"}),
    ("env.tool_format", "hermes", {"Environment"}),
    ("env.max_turns", 3, {"Environment"}),
    ("env.max_turn_tokens", 100, {"Environment"}),
    ("env.max_observation_tokens", 100, {"Environment"}),
    ("env.reward_weight", 0.5, {"Environment"}),
    ("env.turn_discount", 0.9, {"Environment"}),
    ("algo.clip_ratio_c", 3.0, {"Objective"}),
    ("algo.clip_ratio_c", 10.0, set()),
    ("algo.proximal", "recomputed", set()),
    ("algo.importance_mode", "mask", set()),  # without a cap it has no effect
    ("algo.importance_level", "sequence", set()),
    ("algo.reject", {"k3": 0.1}, {"Off-policy tokens"}),
    ("algo.off_policy_mask_threshold", 0.5, {"Off-policy tokens"}),
    ("algo.max_token_staleness", 1, {"Off-policy tokens"}),
    ("algo.loss", "mine.py:loss", {"Objective"}),
    ("algo.loss", "gspo", {"Objective"}),
    ("algo.loss", "cispo", {"Objective"}),
    ("algo.advantage", "mine.py:advantage", {"Advantage"}),
    ("algo.advantage", "opo", {"Advantage"}),
    ("algo.advantage", "gdpo", {"Advantage"}),
    ("algo.advantage", "reinforce++", {"Advantage"}),
    ("algo.normalize", "none", {"Advantage"}),
    ("algo.normalize", "batch", {"Advantage"}),
    ("algo.normalize", "leave-one-out", {"Advantage"}),
    ("algo.advantage_eps", 0.1, {"Advantage"}),
    ("algo.ddof", 0, set()),
    ("algo.clip_high", 0.2, {"Clip-Higher", "Clip bounds"}),
    ("algo.clip_high", 0.1, {"Clip-Higher", "Clip bounds"}),
    ("algo.clip_high", 0.3, {"Clip bounds"}),
    ("algo.clip_low", 0.1, {"Clip bounds"}),
    ("sampling.dynamic", False, {"Dynamic Sampling"}),
    ("sampling.metric", "score", {"Dynamic Sampling"}),
    ("sampling.filter", "mine.py:keep", {"Dynamic Sampling"}),
    ("train.transforms", ["mine.py:add"], {"Batch transforms"}),
    ("sampling.dynamic_batch", True, {"Batch filling"}),
    ("algo.aggregation", "token-mean-per-group", set()),
    ("algo.norm_length", 4096, set()),  # of another aggregation
    ("algo.aggregation", "seq-mean-token-mean", {"Token-level loss"}),
    ("algo.aggregation", "seq-mean-token-sum-norm", {"Token-level loss"}),
    ("algo.aggregation", "micro-batch-token-mean", {"Token-level loss"}),
    ("overlong.shape", "off", {"Soft Overlong Punishment"}),
    ("overlong.mask_truncated", True, {"Overlong Filtering"}),
    ("overlong.masked_in_baseline", False, set()),  # without masking it has no effect
    ("overlong.max_length", 16384, {"Punishment interval"}),
    ("overlong.cache_length", 2048, {"Punishment interval"}),
    ("overlong.factor", 0.5, {"Punishment interval"}),
    ("algo.kl_coef", 0.001, {"KL term"}),
    ("algo.top_entropy_quantile", 0.2, {"Tokens of high entropy"}),
    *((f"algo.{name}", 0.5, set()) for name in ("cov_share", "clip_cov_low", "kl_cov_coef", "tau_pos", "tau_neg")),
    ("algo.clip_cov_high", 2.0, set()),  # options of losses that are not chosen
    ("algo.loss", "sapo", {"Objective"}),
    ("algo.loss", "clip-cov", {"Objective"}),
    ("algo.entropy_coef", 0.001, {"Entropy bonus"}),
    ("algo.entropy_target", 0.2, {"Entropy bonus"}),
    ("algo.entropy_coef_delta", 0.1, set()),  # without a target it has no effect
    ("algo.entropy_coef_max", 0.1, set()),  # likewise
    ("teacher.name", "tiny", {"Teacher"}),
    ("teacher.prompt", "{prompt} {answer}", {"Teacher"}),
    ("algo.kl_kind", "k1", set()),  # without a coefficient it has no effect
    ("algo.kl_in", "reward", set()),  # likewise
    ("algo.kl_unbiased", True, set()),  # without a coefficient it has no effect
    ("algo.ref_mixup_alpha", 0.6, set()),  # likewise
    ("algo.kl_horizon", 100.0, set()),  # without a target it has no effect
    ("algo.positive_lm_coef", 0.1, {"LM loss of correct samples"}),
    ("reward.wrong", 0.0, {"Rule-based reward"}),
    ("reward.correct", 2.0, {"Rule-based reward"}),
    ("reward.verifier", "mine.py:score", {"Rule-based reward"}),
    ("reward.verifier", "exact", set()),
    ("sampling.prompts_per_step", 256, {"Prompts per step", "Updates per step"}),
    ("sampling.group_size", 8, {"Group size", "Updates per step"}),
    ("train.steps", 10_000, {"Length of the run"}),
    ("train.steps", 312, {"Length of the run"}),
    ("train.mini_batches", 1, {"Updates per step", "Length of the run"}),
    ("train.epochs_per_step", 2, {"Updates per step", "Length of the run"}),
    ("train.lr", 5e-6, {"Learning rate"}),
    ("train.lr_schedule", "cosine", {"Learning rate"}),
    ("train.min_lr_share", 0.5, set()),  # without a decay it has no effect
    ("train.warmup_steps", 0, {"Warm-up"}),
    ("train.weight_decay", 0.0, {"Optimizer"}),
    ("train.optimizer", "adamw_8bit", {"Optimizer"}),
    ("model.dtype", "float32", {"Precision"}),
    ("train.betas", [0.9, 0.95], {"Optimizer"}),
    ("train.max_grad_norm", 0.5, {"Optimizer"}),
    ("sampling.max_new_tokens", 32768, {"New tokens"}),
    ("sampling.temperature", 0.7, {"Temperature"}),
    ("sampling.top_p", 0.95, {"Truncated sampling"}),
    ("sampling.top_k", 50, {"Truncated sampling"}),
    ("sampling.min_p", 0.2, {"Truncated sampling"}),
    ("sampling.stop", ["\n\n"], {"Stop strings"}),
    ("sampling.ignore_eos", True, {"No end of sequence"}),
    ("sampling.skip_solved_epochs", 3, {"Skipped prompts"}),
    ("sampling.length_stages", {0: 20480}, {"Length stages"}),
    ("sampling.replay_hard", 0.2, {"Replayed prompts"}),
    ("sampling.replay_pass_rate", 0.5, {"Replayed prompts"}),
    ("sampling.selection", "informative", {"Selected prompts"}),
    ("sampling.source_weights", "informative", {"Selected prompts"}),
    ("data.system_prompt", "Think.", {"Text of prompts"}),
    ("data.chat_template", "never", {"Text of prompts"}),
    ("data.chat_template_kwargs", {"enable_thinking": False}, {"Text of prompts"}),
    ("data.pass_rate", [0.1, 0.9], {"Window of pass rates"}),
    ("data.max_prompt_tokens", 256, {"Prompt tokens"}),
    ("data.train", ["BytedTsinghua-SIA/DAPO-Math-17k", "gsm8k.jsonl"], {"Training prompts"}),
    ("reward.form", "same", {"Form of answers"}),
    ("reward.boxed", True, {"Boxed answers"}),
    ("reward.threshold", 0.5, set()),  # the built-in verifier has none
    ("model.lora", {}, {"LoRA"}),
    ("model.lora.rank", 8, {"LoRA"}),
    ("model.lora.alpha", 8.0, {"LoRA"}),
    ("model.lora.targets", ["q_proj"], {"LoRA"}),
    ("model.lora.save", "adapter", {"LoRA"}),
    ("model.lora.dropout", 0.1, {"LoRA"}),
    ("model.lora.use_rslora", True, {"LoRA"}),
    ("model.lora.use_dora", True, {"LoRA"}),
    ("sampling.cap", 600, set()),
    ("sampling.on_cap", "fill", {"Cap on draws"}),
    ("sampling.on_cap", "partial", {"Cap on draws"}),
    ("sampling.surplus", "carry", {"Surplus groups"}),
    ("sampling.surplus", "requeue", {"Surplus groups"}),
    ("sampling.max_staleness", 0, set()),  # dropped groups do not age
    ("model.name", "Qwen/Qwen2.5-32B-Instruct", {"Model"}),
    ("data.train", "gsm8k.jsonl", {"Training prompts"}),
    ("data.eval", "gsm8k.jsonl", {"Held-out prompts"}),
    ("data.eval", None, {"Held-out prompts"}),
    ("data.eval", {"source": "HuggingFaceH4/aime_2024", "split": "train"}, set()),
    ("eval.prompts", 10, {"Held-out prompts"}),
    ("eval.samples", 1, {"Held-out samples"}),
    ("eval.temperature", 0.0, {"Held-out sampling"}),
    ("eval.top_p", 1.0, {"Held-out sampling"}),
]


@pytest.mark.parametrize(("key", "value", "components"), FLIPS, ids=[f"{k}={v}" for k, v, _ in FLIPS])
def test_a_switch_changes_the_rows_it_belongs_to_and_no_other(key, value, components):
    report = conformance(Config.build(PAPER | {key: value}))
    assert different(report) == components
    for row in report.rows:
        if not row.same:
            assert row.meaning
            assert row.recipe != row.paper
            # The responses of an update follow from the prompts and the group size too, updates from mini-batches, and
            # an environment gives the rewards.
            assert key in row.keys or row.component in {"Updates per step", "Length of the run", "Rule-based reward"}


@pytest.mark.parametrize(
    ("changes", "recipe", "meaning"),
    [
        ({"sampling.surplus": "carry"}, "", "clipped around newer ones, without a correction"),
        ({"algo.importance_cap": 2.0}, ", importance weights truncated at 2", "that sampled, truncated at 2"),
        ({"algo.importance_cap": 5.0, "algo.importance_mode": "mask"}, ", importance weights 0 above 5", "0 above 5"),
        (
            {"algo.importance_cap": 5.0, "algo.importance_floor": 0.5, "algo.importance_level": "sequence"},
            ", importance weights truncated to [0.5, 5] per sample",
            "truncated to [0.5, 5] per sample",
        ),
        (
            {
                **{"algo.importance_cap": 5.0, "algo.importance_floor": 0.5, "algo.importance_mode": "mask"},
                "algo.importance_normalize": True,
            },
            ", importance weights 0 outside [0.5, 5], with mean 1",
            "0 outside [0.5, 5], with mean 1",
        ),
    ],
)
def test_the_ratio_to_the_beginning_of_the_step(changes, recipe, meaning):
    report = conformance(Config.build(PAPER | {"algo.proximal": "recomputed"} | changes))
    (row,) = [row for row in report.rows if row.component == "Ratio"]
    assert (row.recipe, row.same) == (f"to the policy at the beginning of the step{recipe}", False)
    assert row.meaning.endswith(meaning)


def keys_of(table):
    return [key for keys in table for key in keys.split()]


@pytest.mark.parametrize("paper", PAPERS.values(), ids=PAPERS)
def test_every_setting_has_a_row_or_a_reason_to_have_none(paper):
    """A new setting fails here until it is a key of a row or in IRRELEVANT (lab/papers)."""
    compared = {key for component in paper.rows for key in component.keys}
    left_out = [*keys_of(IRRELEVANT.values()), *paper.without_effect.split()]
    assert len(left_out) == len(set(left_out))
    assert compared & set(left_out) == set()
    assert compared | set(left_out) == set(known_keys())


@pytest.mark.parametrize("paper", PAPERS.values(), ids=PAPERS)
def test_every_name_in_the_table_exists(paper):
    cases = [case for row in paper.rows for case in row.cases]
    conditions = [condition for case in cases for condition in (case.get("if", "always"), *case.get("effects", ()))]
    named = {term.removeprefix("not ").split()[0] for condition in conditions for term in condition.split(" and ")}
    texts = [str(text) for case in cases for text in (*case.values(), *case.get("effects", {}).values())]
    named |= {name for text in texts for name in re.findall(r"{([a-z_.]+)(?::[^{}]*)?}", text)}
    assert {"sampling.dynamic", "times", "value"} <= named
    for name in named:
        first, *others = name.split(".")
        assert first in {"value", "number", "paper"} | set(DERIVED) or hasattr(Config(), first), name
        if others and first not in DERIVED:
            assert name in known_keys() or hasattr(getattr(Config(), first), others[0]), name


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("sampling.dynamic", True),
        ("not sampling.dynamic", False),
        ("algo.kl_coef == 0 and sampling.group_size > 1", True),
        ("algo.kl_coef == 0 and sampling.group_size <= 1", False),
        ("algo.clip_high > algo.clip_low", True),
        ("sampling.filter == null", True),
        ("overlong.shape != off", True),
        ("value < number", True),
    ],
)
def test_conditions_of_the_table(condition, holds):
    assert RecipeFacts(Config(), {"value": 1, "number": 2}).hold(condition) is holds


def test_every_setting_of_a_row_is_tried():
    compared = {key for component in PAPERS["dapo"].rows for key in component.keys}
    other = {
        "algo.importance_cap",
        "algo.importance_floor",
        "algo.importance_normalize",
        "algo.kl_target",
        "algo.ref_sync_steps",
        "sampling.ahead",
        "sampling.keep_mask",
        "cluster.placement",
        "engine_options",
        "teacher.weight",
    }  # need a second setting; tested below
    assert compared <= {key for key, _, _ in FLIPS} | other


def test_truncated_sampling_says_whether_the_gradient_is_biased():
    for keeps, recipe, effect in (
        (False, "top_p 0.9, top_k 8", "gradients are biased (set sampling.keep_mask=true)"),
        (True, "top_p 0.9, top_k 8, keep_mask", "ratios and gradients are those of the truncated distribution"),
    ):
        report = conformance(
            Config.build(PAPER | {"sampling.top_k": 8, "sampling.top_p": 0.9, "sampling.keep_mask": keeps})
        )
        (row,) = [row for row in report.rows if not row.same]
        assert (row.component, row.recipe) == ("Truncated sampling", recipe)
        assert effect in row.meaning


def test_additions_to_the_papers_recipe_are_named():
    report = check(
        sampling__min_p=0.2,
        model__lora__rank=8,
        sampling__skip_solved_epochs=1,
        sampling__ignore_eos=True,
        sampling__stop=["END"],
        data__system_prompt="Be [brief].",
    )
    assert report.verdict == "algorithm conformant, 6 settings differ"
    rows = {row.component: row for row in report.rows if not row.same}
    assert rows["Truncated sampling"].recipe == "min_p 0.2"
    assert (
        rows["LoRA"].recipe
        == "lora rank 8, alpha 32, targets all-linear, dropout 0, use_rslora False, use_dora False, save merged"
    )
    assert rows["Stop strings"].recipe == "stop ('END',)"
    assert rows["Text of prompts"].recipe == "system_prompt Be [brief]."


def test_options_of_an_engine_are_named():
    (row,) = (row for row in check(engine="vllm", engine_options={"quantization": "fp8"}).rows if not row.same)
    assert (row.component, row.recipe) == ("Engine's options", "engine_options quantization fp8")


def test_sampling_during_updates_makes_groups_older():
    ray = {"cluster.backend": "ray", "cluster.placement": "separate", "sampling.surplus": "carry"}
    (row,) = (row for row in conformance(Config.build(PAPER | ray)).rows if not row.same)
    assert (row.component, row.recipe) == ("Surplus groups", "carry, up to 1 version old")
    assert row.meaning.endswith("with cluster.placement=separate, engines also sample during updates")
    (row,) = (
        row
        for row in conformance(Config.build(PAPER | ray | {"sampling.dynamic": False})).rows
        if row.component == "Surplus groups"
    )
    assert not row.same


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("aime-2024.jsonl", "./data/../aime-2024.jsonl"),
        ("org/data", {"source": "org/data", "split": "train"}),
        ({"source": "org/data", "name": "main"}, {"source": "org/data", "name": "main"}),
    ],
)
def test_evaluating_on_the_training_prompts_is_an_error(train, held_out):
    with pytest.raises(UserError, match=r"is data\.train: the run would be evaluated on its training prompts; give"):
        check(data__train=train, data__eval=held_out)


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        ("a.jsonl", "b.jsonl"),
        ("org/data", {"source": "org/data", "split": "test"}),
        ({"source": "org/data", "split": "train[:90%]"}, {"source": "org/data", "split": "train[90%:]"}),
        ("arithmetic", "arithmetic"),  # generated prompts: which of them is a parameter of the source
    ],
)
def test_other_prompts_are_no_error(train, held_out):
    check(data__train=train, data__eval=held_out)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"train__lr": 1e-5}, "algorithm conformant, 1 setting differs"),
        ({"train__lr": 1e-5, "eval__samples": 1}, "algorithm conformant, 2 settings differ"),
        ({"algo__clip_high": 0.2, "train__lr": 1e-5}, "not DAPO: Clip-Higher"),
        ({"sampling__dynamic": False, "algo__kl_coef": 0.1}, "not DAPO: Dynamic Sampling, KL term"),
        (
            {"preset": "grpo"},
            "not DAPO: Clip-Higher, Dynamic Sampling, Token-level loss, Soft Overlong Punishment, KL term",
        ),
        (
            {"preset": "dr_grpo"},
            "not DAPO: Advantage, Clip-Higher, Dynamic Sampling, Token-level loss, Soft Overlong Punishment",
        ),
    ],
)
def test_the_verdict(changes, verdict):
    assert check(**changes).verdict == verdict


def test_the_defaults_are_dapo_at_another_scale():
    assert conformance(Config()).verdict.startswith("algorithm conformant")


@pytest.mark.parametrize(
    ("changes", "component", "words"),
    [
        ({"algo__clip_high": 0.2}, "Clip-Higher", "both bounds are 0.2: .* entropy tends to collapse"),
        ({"sampling__group_size": 4}, "Group size", r"12\.50% of the groups carry no signal"),
        ({"train__mini_batches": 1}, "Updates per step", "neither clip bound acts"),
        ({"reward__wrong": 0.0}, "Rule-based reward", "100% of the margin between right and wrong instead of 50%"),
        ({"sampling__prompts_per_step": 16}, "Prompts per step", "1/32 of the paper's"),
        ({"train__lr": 1e-5}, "Learning rate", "10 times the paper's: faster"),
        ({"overlong__cache_length": 2048}, "Punishment interval", "from 18,432 to 20,480"),
        ({"train__steps": 10_000}, "Length of the run", "^16 times the paper's, which train.steps=625 would have$"),
        ({"eval__samples": 8}, "Held-out samples", "2 times that of avg@32"),
        ({"algo__loss": "cispo"}, "Objective", "tokens beyond the bounds keep their gradient"),
        ({"algo__advantage": "opo", "reward__correct": 3.0}, "Rule-based reward", "so they are 2 times as large"),
        ({"algo__ddof": 0}, "Advantage", r"3\.3% larger"),
        (
            {"algo__kl_coef": 0.1, "algo__ref_sync_steps": 50},
            "KL term",
            "^the policy is pulled towards itself of up to 50 ",
        ),
        ({"algo__kl_coef": 0.1, "algo__kl_target": 0.02}, "KL term", "^the policy is kept at 0.02 nats per token"),
        ({"algo__aggregation": "token-mean-per-group"}, "Token-level loss", r"^Eq\. 12, read literally"),
        ({}, "Token-level loss", "as the authors' script"),
        ({"sampling__surplus": "carry"}, "Surplus groups", "trained on later .* up to 1 version newer"),
        ({"sampling__surplus": "carry", "sampling__max_staleness": 0}, "Surplus groups", "^$"),
        ({"sampling__surplus": "carry", "sampling__ahead": 0.5}, "Surplus groups", r"; 0\.5 of a batch is drawn ahead"),
    ],
)
def test_meanings_are_about_the_value(changes, component, words):
    (row,) = (row for row in check(**changes).rows if row.component == component)
    assert re.search(words, row.meaning)


def test_the_batch_arithmetic_of_the_paper():
    assert check(train__steps=100).arithmetic == BatchArithmetic(
        groups_per_step=512,
        samples_per_step=8192,
        updates_per_step=16,
        samples_per_update=512,
        tokens_generated_per_step=167_772_160,
        tokens_generated_per_step_at_cap=5_033_164_800,
        tokens_trained_per_step=167_772_160,
        steps=100,
        pretrain_steps=0,
        total_updates=1600,
    )


@pytest.mark.parametrize("changes", [{"sampling__dynamic": False}, {"sampling__dynamic_batch": True}])
def test_without_redraws_the_cap_has_no_part_in_the_arithmetic(changes):
    numbers = check(**changes).arithmetic
    assert numbers.tokens_generated_per_step_at_cap == numbers.tokens_generated_per_step


def test_passes_over_the_batch_make_updates_not_samples():
    numbers = check(train__epochs_per_step=3).arithmetic
    assert (numbers.updates_per_step, numbers.samples_per_update) == (48, 512)


def test_the_report_fits_80_columns_and_shows_text_as_it_is():
    stream = io.StringIO()
    print_conformance(
        check(preset="grpo", reward__verifier="[b]f.py:score", data__train="a/long/path/to/some/prompts.jsonl"),
        Console(file=stream, width=80),
    )
    output = stream.getvalue()
    assert max(len(line) for line in output.splitlines()) <= 80
    assert "\x1b" not in output
    assert "[b]f.py:score" in " ".join(output.split())
    assert "seq-mean-token-mean" in output
    assert "167,772,160" in output
    assert output.rstrip().endswith("Punishment, KL term")


def test_the_report_prints_to_an_ascii_stream():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    print_conformance(check(preset="grpo"), Console(file=stream, width=80))
    stream.flush()
    assert b"not DAPO" in raw.getvalue()


def test_json_holds_every_row_and_number():
    document = json.loads(conformance_json(check(algo__clip_high=0.2)))
    assert set(document) == {"paper", "arxiv", "why", "verdict", "rows", "arithmetic", "memory"}
    assert (document["paper"], document["arxiv"]) == ("DAPO", "2503.14476")
    (row,) = (row for row in document["rows"] if row["component"] == "Clip-Higher")
    assert (row["reference"], row["kind"], row["same"]) == ("Eq. 10", "algorithm", False)
    assert row["keys"] == ["algo.clip_low", "algo.clip_high"]
    assert document["arithmetic"]["samples_per_step"] == 8192


def test_the_tokens_of_a_policy_that_judges_itself_are_said_to_be_left_out(tmp_path):
    judge, other = tmp_path / "own.yaml", tmp_path / "served.yaml"
    judge.write_text("endpoint: policy\nprompt: '{response}'\nparse: (x)\n")
    other.write_text("endpoint: http://localhost:1/v1\nprompt: '{response}'\nparse: (x)\nmodel: m\n")
    left_out = "own.yaml: the policy also reads and judges each sample, which is not included"
    for verifier, there in ((judge, True), (other, False), (tmp_path / "none.yaml", False)):
        report = check(reward__verifier=str(verifier))
        stream = io.StringIO()
        print_conformance(report, Console(file=stream, width=200))
        assert (left_out in stream.getvalue()) is there
        assert ("note" in json.loads(conformance_json(report))) is there
