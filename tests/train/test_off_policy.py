"""Updates on tokens of another policy: the proximal policy, importance weights, and the note on a large mismatch."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support import SMALL, full_batch, make_prompt, make_sample, small_model, tokenizer, train_sample

from dapo_rl import Config, DAPOTrainer, UserError
from dapo_rl.algo import reference
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.config import AlgoSettings, TrainSettings
from dapo_rl.objectives import LOSSES
from dapo_rl.train.mismatch import LARGE_KL, MismatchNote, newest_mismatch
from dapo_rl.train.policy import HFPolicy
from dapo_rl.train.transforms import scored as scored_by
from dapo_rl.types import Batch, Group, Verdict

CORRECTED = {"proximal": "recomputed", "importance_cap": 1.2}


def make_policy(model, token_budget=10**6, **algo):
    return HFPolicy(
        model,
        pad_id=tokenizer().pad_token_id,
        temperature=1.0,
        algo=AlgoSettings(**algo),
        train=TrainSettings(lr=1e-3, max_grad_norm=1e9),
        norm_length=20,
        token_budget=token_budget,
    )


def samples_for(model, count=6, masked=()):
    """Random samples in groups of two; the behaviour policy is a random bit away from the model, the proximal one
    another bit."""
    rng = np.random.default_rng(0)
    samples = [
        train_sample(
            prompt_ids=rng.integers(3, 250, rng.integers(2, 7)),
            token_ids=rng.integers(3, 250, rng.integers(2, 9)),
            logps=0.0,
            advantages=float(rng.normal()),
            group=i // 2,
            in_loss=i not in masked,
        )
        for i in range(count)
    ]
    logps = make_policy(model).score(samples)
    return [
        s.replace(logps=lp + rng.normal(0, 0.4, len(lp)), proximal_logps=lp + rng.normal(0, 0.2, len(lp)))
        for s, lp in zip(samples, logps, strict=True)
    ]


def gradient(policy, samples):
    policy.update(samples, lr=0.0)
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()])


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("token_budget", [10**6, 24])
def test_loss_and_metrics_equal_the_reference(mode, token_budget):
    model = small_model()
    samples = samples_for(model, masked=(2,))
    width = max(len(s.token_ids) for s in samples)

    def matrix(rows):
        return np.array([[*row, *[0.0] * (width - len(row))] for row in rows])

    new = matrix([make_policy(model).score([s])[0] for s in samples])
    proximal, behaviour = matrix([s["proximal_logps"] for s in samples]), matrix([s.logps for s in samples])
    mask = np.array([[s.loss_mask.any() and t < len(s.token_ids) for t in range(width)] for s in samples])
    advantages = [float(s["advantages"][0]) for s in samples]
    weights = reference.importance_weights(proximal, behaviour, mask, cap=1.2, mode=mode)
    policy = make_policy(model, token_budget, **CORRECTED, importance_mode=mode)
    metrics = policy.update(samples, lr=0.0).metrics
    expected = reference.dapo_policy_loss(new, proximal, advantages, mask, weights=weights)
    assert metrics["actor/pg_loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["rollout/is_weight_mean"] == pytest.approx(weights[mask].mean(), rel=1e-5)
    share = (np.exp(proximal - behaviour)[mask] > 1.2).mean()
    assert 0 < share < 1
    assert metrics["rollout/is_above_cap_share"] == pytest.approx(share)
    fractions = reference.clip_fractions(new, proximal, advantages, mask)
    assert metrics["actor/pg_clipfrac_high"] == pytest.approx(fractions.high)
    assert fractions.high > 0
    assert metrics["actor/ppo_kl"] == pytest.approx((proximal - new)[mask].mean(), rel=1e-3)
    # The mismatch is between the engine and the trainer, whatever the ratio is relative to.
    d = (new - behaviour)[mask]
    assert metrics["actor/mismatch_kl"] == pytest.approx((np.exp(d) - d - 1).mean(), rel=1e-3)


@pytest.mark.parametrize("aggregation", ["token-mean", "token-mean-per-group", "seq-mean-token-mean"])
def test_the_gradient_is_the_same_for_any_split_and_order(aggregation):
    model = small_model()
    samples = samples_for(model, masked=(1,))
    whole = gradient(make_policy(model, **CORRECTED, aggregation=aggregation), samples)
    split = make_policy(model, 20, **CORRECTED, aggregation=aggregation)
    assert len(split._micro_batches(samples)) > 1
    torch.testing.assert_close(gradient(split, samples[::-1]), whole, atol=1e-5, rtol=1e-4)


def test_by_default_scores_of_the_proximal_policy_have_no_effect():
    model = small_model()
    samples = samples_for(model)
    plain = [s.replace(proximal_logps=None) for s in samples]
    ours, theirs = (make_policy(model).update(given, 0.0).metrics for given in (samples, plain))
    assert ours == pytest.approx(theirs, rel=0, abs=0, nan_ok=True)
    assert "rollout/is_weight_mean" not in ours


def test_a_single_update_needs_no_scores():
    """It starts from the proximal policy, so that the ratio is 1, and the weights are those of scores."""
    model = small_model()
    policy = make_policy(model, **CORRECTED)
    bare = [s.replace(proximal_logps=None) for s in samples_for(model)]
    scored = [s.replace(proximal_logps=lp) for s, lp in zip(bare, policy.score(bare), strict=True)]
    torch.testing.assert_close(gradient(policy, bare), gradient(policy, scored), atol=1e-6, rtol=1e-5)
    metrics = policy.update(bare, 0.0).metrics
    assert (metrics["actor/ppo_kl"], metrics["actor/pg_clipfrac"]) == (0.0, 0.0)
    assert metrics["rollout/is_weight_mean"] != pytest.approx(1.0, abs=1e-3)


def test_scores_for_only_some_samples_are_an_error():
    model = small_model()
    first, *others = samples_for(model)
    with pytest.raises(ValueError, match="some samples have log-probabilities under the proximal policy"):
        make_policy(model, **CORRECTED).update([first.replace(proximal_logps=None), *others], 0.0)


def test_a_custom_loss_gets_the_proximal_policy_and_is_weighted(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("def f(new, old, advantages, mask):\n    return old * 1.0 + 0.0 * new\n")
    model = small_model()
    samples = samples_for(model)
    metrics = make_policy(model, **CORRECTED, loss=f"{path}:f").update(samples, 0.0).metrics
    proximal = np.concatenate([s["proximal_logps"] for s in samples])
    weights = reference.importance_weights(proximal, np.concatenate([s.logps for s in samples]), cap=1.2)
    assert metrics["actor/pg_loss"] == pytest.approx((proximal * weights).mean(), rel=1e-5)


def test_only_trained_samples_are_scored_each_with_its_own():
    verdicts = (Verdict(1.0, True, "correct"), Verdict(-1.0, False, "wrong"))
    config = Config.build({"sampling.group_size": 2, "sampling.prompts_per_step": 2, "overlong.mask_truncated": True})
    groups = [
        Group(0, make_prompt("p"), (make_sample(3), make_sample(4, "length")), verdicts),
        Group(1, make_prompt("q"), (make_sample(5), make_sample(2)), verdicts),
    ]
    batch = full_batch(groups, config)
    add_logps = scored_by(
        "proximal_logps", lambda samples: [np.full(len(s.token_ids), -len(s.token_ids)) for s in samples]
    )
    scored = add_logps(batch)
    found = [
        None if s.get("proximal_logps") is None else s["proximal_logps"].tolist() for g in scored for s in g.samples
    ]
    assert found == [[-3] * 3, None, [-5] * 5, [-2] * 2]
    assert [s.replace(proximal_logps=None) for g in scored for s in g.samples] == [s for g in batch for s in g.samples]


def test_a_cap_needs_a_recomputed_proximal_policy():
    with pytest.raises(
        UserError, match=r"algo.importance_cap: 2 with algo.proximal=behaviour: .*; set algo.proximal=r"
    ):
        Config.build({"algo.importance_cap": 2.0, "algo.proximal": "behaviour"})
    with pytest.raises(UserError, match=r"proximal=auto, which is behaviour for algo.loss=dapo: .*; set algo.proximal"):
        Config.build({"algo.importance_cap": 2.0})
    for name, entry in LOSSES.items():
        if entry.per_sequence:
            assert Config.build({"algo.importance_cap": 2.0, "algo.loss": name}).algo.old_policy == "recomputed"
    with pytest.raises(UserError, match=r"algo\.importance_cap"):
        Config.build({"algo.importance_cap": 0.0, "algo.proximal": "recomputed"})


def test_the_note_on_a_large_mismatch_comes_once_and_names_remedies():
    note = MismatchNote(Config())
    assert note.take({}) is None
    assert note.take({"rollout/mismatch_kl": math.nan}) is None
    assert note.take({"rollout/mismatch_kl": 0.01}) is None
    assert note.take({"rollout/mismatch_kl": 0.02}) == (
        "rollout/mismatch_kl is 0.02: the engine's log-probabilities differ from the trainer's by about 0.2 per token; "
        "remedies: model.dtype=float32, or engine=hf, or algo.proximal=recomputed with algo.importance_cap=2"
    )
    assert note.take({"rollout/mismatch_kl": 0.5}) is None
    exact = MismatchNote(Config.build({"model.dtype": "float32", "engine": "hf"})).take({"rollout/mismatch_kl": 0.02})
    assert exact.endswith("remedies: algo.proximal=recomputed with algo.importance_cap=2")
    corrected = Config.build({f"algo.{name}": value for name, value in CORRECTED.items()})
    assert MismatchNote(corrected).take({"rollout/mismatch_kl": 0.5}) is None


GSPO = {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"}


def test_a_ratio_per_sequence_is_relative_to_the_trainers_policy_by_default():
    by_default = {name: Config.build({"algo.loss": name}).algo.old_policy for name in LOSSES}
    assert by_default == dict.fromkeys(LOSSES, "behaviour") | {"gspo": "recomputed", "gspo-token": "recomputed"}
    assert Config.build({"algo.loss": "own.py:f"}).algo.old_policy == "behaviour"
    several = {f"algo.{name}": value for name, value in GSPO.items()} | {"train.mini_batches": 2}
    assert Config.build(several).scores_first
    assert not Config.build(several | {"algo.proximal": "behaviour"}).scores_first
    # A run keeps what it was started with, whatever the default is.
    saved = Config.build(several).resolved()
    assert saved["algo"]["proximal"] == "recomputed"
    saved["algo"]["proximal"] = "behaviour"
    assert Config.build(saved).algo.old_policy == "behaviour"


def test_gspo_does_not_clip_the_difference_between_engine_and_trainer():
    """The engine is off by 0.001 for every token of two samples, in the direction that their advantage is clipped in,
    and by a tenth of that for the others: a third of the sequences has no gradient, before any update."""
    model = small_model()
    samples = [s.replace(proximal_logps=None) for s in samples_for(model)]
    exact = make_policy(model).score(samples)

    def sampled(i, sample, logps):
        side = -np.sign(sample["advantages"][0])
        return sample.replace(logps=logps + side * (1e-3 if i < 2 else 1e-4), fresh=np.full(len(logps), True))

    samples = [sampled(i, s, lp) for i, (s, lp) in enumerate(zip(samples, exact, strict=True))]
    clipped = make_policy(model, **GSPO, proximal="behaviour").update(samples, 0.0).metrics
    assert clipped["actor/mismatch_clipfrac"] == pytest.approx(2 / 6)
    free = make_policy(model, **GSPO).update(samples, 0.0).metrics
    assert (free["actor/mismatch_clipfrac"], free["actor/pg_clipfrac"]) == (0.0, 0.0)
    # A sequence with one older token, one without an advantage and tokens of other weights do not count.
    first, second, third, *others = samples
    partly = first.replace(fresh=np.arange(len(first.logps)) > 0)
    flat = third.replace(advantages=np.zeros_like(third["advantages"]))
    stale = [s.replace(fresh=np.zeros(len(s.logps), bool)) for s in others[1:]]
    policy = make_policy(model, **GSPO, proximal="behaviour")
    assert policy.update([partly, second, flat, others[0], *stale], 0.0).metrics["actor/mismatch_clipfrac"] == 1 / 2
    assert math.isnan(policy.update(stale, 0.0).metrics["actor/mismatch_clipfrac"])
    # A ratio per token counts tokens.
    by_token = make_policy(model, clip_low=3e-4, clip_high=4e-4).update(samples, 0.0).metrics
    beyond = sum(len(s.logps) for s in samples[:2])
    assert by_token["actor/mismatch_clipfrac"] == pytest.approx(beyond / sum(len(s.logps) for s in samples))


def test_a_note_tells_that_the_mismatch_alone_is_clipped():
    gspo = {f"algo.{name}": value for name, value in GSPO.items()}
    behaviour = gspo | {"algo.proximal": "behaviour"}
    note = MismatchNote(Config.build(behaviour))
    assert note.take({"rollout/mismatch_clipfrac": 0.05}) is None
    assert note.take({"rollout/mismatch_clipfrac": 0.21}) == (
        "21% of sequences are clipped before the policy has changed, by the difference between the engine's and the "
        "trainer's log-probabilities alone; set algo.proximal=recomputed"
    )
    assert note.take({"rollout/mismatch_clipfrac": 0.9}) is None
    assert MismatchNote(Config.build(gspo)).take({"rollout/mismatch_clipfrac": 0.9}) is None
    assert MismatchNote(Config()).take({"rollout/mismatch_clipfrac": 0.1}).startswith("10% of tokens are clipped")
    own = Config.build({"algo.loss": "own.py:f"})
    assert MismatchNote(own).take({"rollout/mismatch_clipfrac": 0.9}) is None


def group_of(*samples):
    return Group(0, make_prompt("p"), samples, ())


def sample_of(old, fresh, **more):
    return train_sample([5], [3] * len(old), old, 1.0, 0, fresh=fresh, **more)


def test_a_first_mini_batch_without_fresh_tokens_leaves_the_mismatch_to_the_newest_group_that_has_some():
    asked = []

    def score(samples):
        asked.extend(samples)
        return [np.float32([-1.2, -9.0, -0.5])[: len(s.logps)] for s in samples]

    stale = sample_of([-1.0, -1.0], False)
    # Only the first and last token count: the second is from earlier weights, and other samples are not in the loss.
    partly = sample_of([-1.0, -1.0, -0.7], [True, False, True])
    truncated, environment = sample_of([-3.0], True, in_loss=False), sample_of([-3.0], True, mask=False)
    older = group_of(sample_of([-2.0], True))
    batch = Batch((group_of(stale), older, group_of(stale, partly, truncated, environment), group_of(stale)))
    expected = ((math.exp(-0.2) + 0.2 - 1) + (math.exp(0.2) - 0.2 - 1)) / 2
    assert newest_mismatch(batch, score) == pytest.approx(expected, rel=1e-5)
    assert asked == [partly]
    # What the step has scored anyway is not scored again.
    scored = partly.replace(proximal_logps=np.float32([-1.2, -9.0, -0.5]))
    assert newest_mismatch(Batch((group_of(scored),)), pytest.fail) == pytest.approx(expected, rel=1e-5)
    assert math.isnan(newest_mismatch(Batch((group_of(stale, truncated, environment),)), pytest.fail))


@pytest.mark.slow
def test_a_run_that_trains_on_carried_groups_first_knows_its_mismatch(tmp_path):
    updates = ["sampling.prompts_per_step=16", "train.mini_batches=16", "train.steps=2"]
    _, lines, _ = run_of(tmp_path / "run", "sampling.ahead=0.5", *updates)
    assert all(0 < line["sampling/staleness_mean"] < 1 for line in lines[1:])
    assert all(line["rollout/mismatch_kl"] < 1e-6 for line in lines)


NOISY = """
import dataclasses
import numpy as np
from dapo_rl.engines.native.engine import NativeEngine

class Noisy(NativeEngine):
    def __init__(self, model, tokenizer, settings, *, dtype, longest):
        super().__init__(model, tokenizer, dtype=dtype, longest=longest, max_batch=settings.max_batch)

    def poll(self, timeout_s=None):
        return [self.off(completion) for completion in super().poll(timeout_s)]

    def off(self, completion):
        sample = completion.sample
        logps = np.minimum(sample.logps + np.where(sample.token_ids % 2, 0.3, -0.3), 0)
        return dataclasses.replace(completion, sample=sample.replace(logps=logps))
"""


def run_of(path, *overrides, resume=False):
    quick = [
        *SMALL,
        "data.eval=null",
        "eval.every=null",
        "train.warmup_steps=0",
        "train.lr=1e-3",
        "train.lr_schedule=constant",
    ]
    config = Config.load(DEFAULT_RECIPE, [*quick, "sampling.max_batch=64", "checkpoint.every=1", *overrides])
    with DAPOTrainer(config=config, run_dir=path) as trainer:
        trainer.train(resume=resume)
    lines = [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]
    notes = (Path(path) / "notes.jsonl").read_text() if (Path(path) / "notes.jsonl").exists() else ""
    return load_file(path / "model" / "model.safetensors"), lines, notes


RECOMPUTED = ["algo.proximal=recomputed", "algo.importance_cap=2"]


@pytest.mark.slow
def test_a_run_on_an_engine_that_is_off_is_corrected_and_resumes_exactly(tmp_path, monkeypatch):
    (tmp_path / "noisy.py").write_text(NOISY)
    monkeypatch.chdir(tmp_path)
    noisy = "engine=noisy.py:Noisy"
    _, plain, notes = run_of(tmp_path / "plain", noisy, "train.steps=2")
    assert plain[0]["rollout/mismatch_kl"] > LARGE_KL
    assert notes.count("algo.proximal=recomputed") == 1
    weights, corrected, notes = run_of(tmp_path / "corrected", noisy, *RECOMPUTED, "train.steps=2")
    assert "algo.proximal=recomputed" not in notes
    # All ratios to the engine are far from 1; those to the trainer are 1 in the first update.
    assert plain[0]["actor/pg_clipfrac"] > 3 * corrected[0]["actor/pg_clipfrac"]
    # Later updates are compared with the beginning of the step; without scores, each would be compared with itself.
    assert abs(corrected[0]["actor/ppo_kl"]) > 1e-4
    assert math.exp(-0.3) < corrected[0]["rollout/is_weight_mean"] < math.exp(0.3)
    assert corrected[0]["rollout/is_above_cap_share"] == 0
    resumed_path = Path(shutil.copytree(tmp_path / "corrected", tmp_path / "resumed"))
    shutil.rmtree(resumed_path / "checkpoints" / "step-2")
    resumed, _, _ = run_of(resumed_path, noisy, *RECOMPUTED, "train.steps=2", resume=True)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights.items())


@pytest.mark.slow
def test_with_an_exact_engine_the_correction_changes_almost_nothing(tmp_path):
    plain, _, _ = run_of(tmp_path / "plain", "train.steps=1")
    corrected, lines, _ = run_of(tmp_path / "corrected", *RECOMPUTED, "train.steps=1")
    assert lines[0]["rollout/is_weight_mean"] == pytest.approx(1, abs=1e-5)
    for name, tensor in plain.items():
        torch.testing.assert_close(corrected[name], tensor, atol=2e-4, rtol=0)


@pytest.mark.slow
def test_rejection_on_an_engine_that_is_off_and_metrics_of_a_single_update(tmp_path, monkeypatch):
    (tmp_path / "noisy.py").write_text(NOISY)
    monkeypatch.chdir(tmp_path)
    noisy = "engine=noisy.py:Noisy"
    single = ["train.steps=1", "train.mini_batches=1", "train.epochs_per_step=1"]
    # Ratios are about exp(±0.3): 0.74 and 1.35, or closer to 1 where a token is almost certain.
    _, (line,), _ = run_of(tmp_path / "single", noisy, *RECOMPUTED, *single)
    assert 1.2 < line["rollout_corr/rollout_is_max"] < 1.36
    assert 0.73 < line["rollout_corr/rollout_is_min"] < 0.8
    assert 0.9 < line["rollout_corr/rollout_is_eff_sample_size"] < 1
    assert line["rollout_corr/k3_kl"] == pytest.approx(line["rollout/mismatch_kl"], rel=1e-3)
    assert (line["actor/ppo_kl"], line["actor/pg_clipfrac"]) == (0.0, 0.0)
    reject = "algo.reject.token=[0.8,10]"
    _, (rejected,), notes = run_of(tmp_path / "rejected", noisy, *RECOMPUTED, *single, reject)
    share = rejected["rollout_corr/rollout_rs_masked_fraction"]
    assert 0.02 < share < 0.8
    tokens = line["sampling/tokens_trained"]
    assert rejected["sampling/tokens_trained"] == pytest.approx(tokens * (1 - share))
    summary = json.loads((tmp_path / "rejected" / "summary.json").read_text())
    assert summary["tokens"]["off_policy"] == pytest.approx(tokens * share)
    assert "is truncated" not in notes
    narrow = ["algo.reject.token=[0.999,1.001]", "sampling.top_k=200"]
    _, (none,), notes = run_of(tmp_path / "none", noisy, *single, *narrow)
    assert notes.count("sampling.top_k=200: sampling is truncated, but") == 1
    assert none["rollout_corr/rollout_rs_masked_fraction"] > 2 * share


@pytest.mark.slow
def test_a_run_on_old_samples_says_how_to_correct_them(tmp_path):
    words, old = ["train.steps=1", "train.mini_batches=2", "sampling.ahead=2"], "sampling.max_staleness=2"
    _, _, notes = run_of(tmp_path / "clipped", *words, old)
    assert notes.count("sampling.ahead=2: samples can be several weight versions old") == 1
    _, _, notes = run_of(tmp_path / "weighted", *words, old, *RECOMPUTED)
    assert "several weight versions old" not in notes
    _, _, notes = run_of(tmp_path / "one", *words, "sampling.max_staleness=1")
    assert "several weight versions old" not in notes
