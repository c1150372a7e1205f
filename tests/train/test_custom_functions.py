"""A loss and an advantage function of the user's own: what they are given, what they may return, and what is said."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from support import REPOSITORY, full_batch, make_prompt, with_reference
from test_batch import GROUP, config
from test_policy import gradient, make_policy, samples_for, small_model

from dapo_rl.config import AlgoSettings, Config
from dapo_rl.errors import NonFiniteError, UserError
from dapo_rl.models.response_logps import response_logps
from dapo_rl.objectives import LOSSES
from dapo_rl.objectives.aggregation import policy_token_losses
from dapo_rl.train.batch import make_batch, with_advantages
from dapo_rl.train.custom import build_advantages, build_losses
from dapo_rl.train.transforms import build_transforms
from dapo_rl.trainer import DAPOTrainer

EXAMPLE = REPOSITORY / "examples" / "own_loss.py"
DEFAULTS = {"algo.loss": "dapo", "algo.advantage": "group"}
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28, "clip_ratio_c": None}


def own(tmp_path, body, name="f"):
    path = tmp_path / "own.py"
    path.write_text(f"import sys\nimport torch\n\n\n{body}\n")
    return f"{path}:{name}"


def loss_with(tmp_path, line):
    spec = own(tmp_path, f"def f(new_logps, old_logps, advantages, mask):\n    {line}")
    return build_losses(AlgoSettings(loss=spec))


def advantages_with(tmp_path, line):
    return build_advantages(AlgoSettings(advantage=own(tmp_path, f"def f(rewards, mask):\n    {line}")))


def inputs():
    new = torch.tensor([[-1.0, -2.0, torch.nan], [-0.5, -0.1, -0.7]], requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    return new, torch.tensor([[-1.1, -1.5, 0.0], [-0.5, -0.3, -0.2]]), torch.tensor([1.0, -1.0]), mask


# The loss.


@pytest.mark.parametrize("settings", [{}, {"kl_coef": 0.1, "reference": small_model(1)}, {"dtype": torch.bfloat16}])
@pytest.mark.parametrize("token_budget", [1, 20, 10**6])
def test_the_loss_of_dapo_from_a_file_gives_the_same_gradient(tmp_path, token_budget, settings):
    spec = own(tmp_path, "from dapo_rl.objectives.aggregation import policy_token_losses as f")
    samples = samples_for(small_model(), masked=(2,))
    if "reference" in settings:
        samples = with_reference(make_policy(small_model(), **settings), samples)
    train = {"lr": 1e-3, "gradient_checkpointing": True}
    ours, theirs = (
        gradient(make_policy(small_model(), token_budget, train, loss=loss, **settings), samples)
        for loss in ("dapo", spec)
    )
    assert torch.equal(ours, theirs)


def test_a_loss_gets_a_number_for_each_token_and_nothing_from_padding(tmp_path):
    loss = loss_with(tmp_path, "f.seen = (new_logps, old_logps, advantages, mask); return new_logps * advantages")
    new, old, advantages, mask = inputs()
    losses = loss(new, old, advantages, mask, **BOUNDS)
    assert losses.tolist() == [[-1.0, -2.0, 0.0], [0.5, pytest.approx(0.1), pytest.approx(0.7)]]
    seen_new, seen_old, seen_advantages, seen_mask = loss._function.seen
    assert seen_new.tolist() == [[-1.0, -2.0, 0.0], pytest.approx([-0.5, -0.1, -0.7])]
    assert seen_old.tolist()[0][2] == 0
    assert seen_advantages.tolist() == [[1, 1, 0], [-1, -1, -1]]
    assert seen_mask is not mask
    losses.sum().backward()
    assert new.grad.tolist() == [[1, 1, 0], [-1, -1, -1]]


@pytest.mark.parametrize(
    ("parameters", "seen"),
    [("", {}), (", clip_low", {"clip_low": 0.2}), (", *, clip_high=0, **rest", {"clip_high": 0.28})],
)
def test_a_loss_gets_the_settings_that_it_has_parameters_for(tmp_path, parameters, seen):
    body = "f.seen = dict(locals())\n    return new_logps * 1"
    spec = own(tmp_path, f"def f(new_logps, old_logps, advantages, mask{parameters}):\n    {body}")
    loss = build_losses(AlgoSettings(loss=spec))
    loss(*inputs(), **BOUNDS)
    assert {key: loss._function.seen.get(key) for key in seen} == seen
    if "rest" in parameters:
        assert loss._function.seen["rest"] == {"clip_low": 0.2, "clip_ratio_c": None}


def test_what_a_loss_does_to_its_tensors_stays_with_it(tmp_path):
    loss = loss_with(tmp_path, "mask[:] = False; old_logps.zero_(); advantages.zero_(); return new_logps * 1")
    new, old, advantages, mask = inputs()
    before = [tensor.clone() for tensor in (old, advantages, mask)]
    assert loss(new, old, advantages, mask, **BOUNDS)[0, 0] == -1
    assert all(map(torch.equal, before, (old, advantages, mask)))


RETURNED = "; it returns a finite loss for each token, [B, T], with a gradient to new_logps"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return (new_logps * advantages).mean()", f"returned the shape [] for [2, 3]{RETURNED}"),
        ("return new_logps[:, 1:]", f"returned the shape [2, 2] for [2, 3]{RETURNED}"),
        ("return new_logps.tolist()", f"returned a list{RETURNED}"),
        ("pass", f"returned a NoneType{RETURNED}"),
        ("return mask", f"returned torch.bool on cpu{RETURNED}"),
        ("return new_logps.detach()", f"returned losses without a gradient{RETURNED}"),
        ("return new_logps / 0", f"returned a loss that is not finite{RETURNED}"),
        ("return (new_logps + 1e3).exp()", f"returned a loss that is not finite{RETURNED}"),
        ("return new_logps[5]", "raised IndexError: index 5 is out of bounds for dimension 0 with size 2"),
        ("sys.exit(0)", "raised SystemExit: 0"),
        ("raise BaseExceptionGroup('both', [SystemExit()])", "raised BaseExceptionGroup: both (1 sub-exception)"),
    ],
)
def test_what_is_wrong_with_a_loss_is_one_line(tmp_path, line, said):
    loss = loss_with(tmp_path, line)
    with pytest.raises(UserError) as error:
        loss(*inputs(), **BOUNDS)
    assert str(error.value) == f"algo.loss: {tmp_path}/own.py:f {said}"
    assert ("own.py" in error.value.more) == said.startswith("raised")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "r = (new_logps - old_logps).exp(); r.clamp_(max=1.1); return -r * advantages",
            "raised RuntimeError: one of the",
        ),
        (
            "return torch.where(mask, new_logps, new_logps * torch.sqrt(new_logps * 0))",
            "returned losses whose gradient is not finite; it returns",
        ),
        ("return torch.zeros_like(new_logps, requires_grad=True)", "returned losses without a gradient"),
    ],
)
def test_what_goes_wrong_in_the_gradient_of_a_loss_is_one_line_too(tmp_path, line, said):
    spec = own(tmp_path, f"def f(new_logps, old_logps, advantages, mask):\n    {line}")
    model = small_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    with pytest.raises(UserError, match=rf"^algo\.loss: {re.escape(spec)} {said}"):
        make_policy(model, loss=spec).update(samples_for(small_model()), lr=1e-3)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_model_that_diverged_is_not_the_fault_of_the_loss(tmp_path):
    samples = samples_for(small_model())
    model = small_model()
    torch.nn.init.constant_(model.model.norm.weight, torch.nan)
    spec = own(tmp_path, "from dapo_rl.objectives.aggregation import policy_token_losses as f")
    with pytest.raises(NonFiniteError):
        make_policy(model, loss=spec).update(samples, lr=1e-3)


def test_out_of_memory_in_a_loss_halves_the_micro_batch(tmp_path):
    body = (
        "from dapo_rl.objectives.aggregation import policy_token_losses\n\n\ndef f(new_logps, *tensors, **settings):\n"
        "    if len(new_logps) > 2:\n        raise torch.OutOfMemoryError('CUDA out of memory')\n"
        "    return policy_token_losses(new_logps, *tensors, **settings)"
    )
    samples = samples_for(small_model())
    policy = make_policy(small_model(), loss=own(tmp_path, body))
    notes = policy.update(samples, lr=0.0).notes
    torch.testing.assert_close(gradient(policy, samples), gradient(make_policy(small_model()), samples))
    assert "out of GPU memory" in notes[0]


# Advantages.


def test_advantages_of_ones_own_take_the_place_of_the_groups(tmp_path):
    spec = own(tmp_path, "def f(rewards, mask):\n    f.seen = rewards, mask\n    return rewards * 2")
    batch = full_batch([GROUP], config(**{"algo.advantage": spec, "algo.normalize": "none"}))
    assert [s["advantages"][0] for s in batch.groups[0].samples] == pytest.approx([2.0, 1.0, -2.0, -4.0])


def test_advantages_get_the_settings_that_they_have_parameters_for(tmp_path):
    body = "f.seen = dict(locals())\n    return rewards * lengths"
    spec = own(tmp_path, f"def f(rewards, mask, *, lengths, eps, **rest):\n    {body}")
    estimate = build_advantages(AlgoSettings(advantage=spec, ddof=0, advantage_eps=0.5))
    rewards, lengths = torch.tensor([[1.0, -1.0]]), torch.tensor([[3, 4]])
    assert estimate(rewards, None, lengths).tolist() == [[3, -4]]
    seen = estimate._function.seen
    assert (seen["eps"], seen["rest"]) == (0.5, {"normalize": "group", "ddof": 0})
    batch = full_batch([GROUP], config(**{"algo.advantage": spec}))
    shown = [(len(s.token_ids), s["advantages"][0] / s.scalars["reward"]) for s in batch.samples]
    assert all(length == pytest.approx(factor) for length, factor in shown)


def test_samples_outside_the_mask_have_no_advantage(tmp_path):
    estimate = advantages_with(tmp_path, "return torch.where(mask, rewards - rewards[mask].mean(), torch.nan)")
    rewards, mask = torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[True, True, False]])
    assert estimate(rewards, mask).tolist() == [[-1, 1, 0]]
    assert estimate(rewards, None).sum() == pytest.approx(0, abs=1e-5)


RETURNED_ADVANTAGES = "; it returns a finite advantage for each sample, [P, G], or token, [P, G, T]"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return rewards.mean(1)", f"returned the shape [2] for [2, 2]{RETURNED_ADVANTAGES}"),
        ("return rewards / 0", f"returned an advantage that is not finite{RETURNED_ADVANTAGES}"),
        ("return rewards.tolist()", f"returned a list{RETURNED_ADVANTAGES}"),
        ("return rewards[9]", "raised IndexError: index 9 is out of bounds for dimension 0 with size 2"),
        ("sys.exit(1)", "raised SystemExit: 1"),
    ],
)
def test_what_is_wrong_with_advantages_is_one_line(tmp_path, line, said):
    with pytest.raises(UserError) as error:
        advantages_with(tmp_path, line)(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), None)
    assert str(error.value) == f"algo.advantage: {tmp_path}/own.py:f {said}"


@pytest.mark.parametrize("length_of", ["lengths", "response_mask.sum(-1)", "behaviour_logps.ne(0).sum(-1)"])
def test_advantages_take_tensors_of_the_batch_by_name(tmp_path, length_of):
    body = f"f.seen = dict(locals())\n    return rewards + {length_of} * 0"
    names = "lengths, correct, truncated, response_mask, behaviour_logps, teacher_logps"
    spec = own(tmp_path, f"def f(rewards, mask, *, {names}):\n    {body}")
    estimate = build_advantages(AlgoSettings(advantage=spec))
    batch = make_batch([GROUP, replace(GROUP, draw=1)], config())
    first, *others = batch.samples
    rows = np.arange(len(first.token_ids), dtype=np.float32)
    batch = with_advantages(batch.with_samples([first.replace(teacher_logps=rows), *others]), estimate)
    seen = estimate._function.seen
    assert seen["correct"].tolist() == [[v.correct for v in GROUP.verdicts]] * 2
    assert seen["truncated"].tolist() == [[s.truncated for s in GROUP.samples]] * 2
    assert seen["response_mask"].sum(-1).tolist() == [[len(s.token_ids) for s in GROUP.samples]] * 2
    for place, sample in zip(np.ndindex(2, len(GROUP.samples)), batch.samples, strict=True):
        assert seen["behaviour_logps"][place][: len(sample.token_ids)].tolist() == sample.logps.tolist()
        assert not seen["behaviour_logps"][place][len(sample.token_ids) :].any()
    assert seen["teacher_logps"][0, 0, : len(rows)].tolist() == rows.tolist()
    assert seen["teacher_logps"].sum() == rows.sum()
    assert [s["advantages"][0] for s in batch.samples] == pytest.approx([s.scalars["reward"] for s in batch.samples])


def test_an_advantage_can_differ_by_token(tmp_path):
    spec = own(
        tmp_path,
        "def f(rewards, mask, *, response_mask):\n"
        "    return rewards[..., None] * torch.arange(response_mask.shape[-1]) * response_mask",
    )
    for sample in full_batch([GROUP], config(**{"algo.advantage": spec})).samples:
        expected = sample.scalars["reward"] * np.arange(len(sample.token_ids))
        assert sample["advantages"].tolist() == pytest.approx(expected.tolist())


def test_an_advantage_that_takes_the_entropy_has_it_scored(tmp_path):
    spec = own(tmp_path, "def f(rewards, mask, *, entropy):\n    return rewards[..., None] * entropy")
    policy = make_policy(small_model())
    transforms = build_transforms(config(), policy, build_advantages(AlgoSettings(advantage=spec)))
    samples = samples_for(small_model(), count=len(GROUP.samples))
    batch = make_batch([replace(GROUP, prompt=make_prompt("p"), samples=tuple(samples))], config())
    for transform in transforms:
        batch = transform(batch)
    stats = response_logps(small_model(), batch.samples, 1.0, 0)
    for i, sample in enumerate(batch.samples):
        expected = sample.scalars["reward"] * stats.entropy[i, : len(sample.token_ids)].detach().numpy()
        assert sample["advantages"].tolist() == pytest.approx(expected.tolist(), rel=1e-4)


# Settings, and whole runs.


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("algo.loss=dap", f"algo.loss: 'dap' is not one of {', '.join(LOSSES)}; did you mean dapo?"),
        ("algo.loss=gsop", "kl-cov; did you mean gspo?"),
        (
            "algo.advantage=vtrace",
            "algo.advantage: 'vtrace' is not one of group, opo, reinforce++, reinforce++-baseline, gdpo, gae, distill…",
        ),
    ],
)
def test_a_name_that_is_none_is_met_in_the_settings(setting, said):
    with pytest.raises(UserError, match=re.escape(said.rstrip("…"))):
        Config.load(overrides=[setting])


def test_one_sample_has_something_to_be_compared_with_where_the_function_says_so():
    assert Config.build({"sampling.group_size": 1, "sampling.dynamic": False, "algo.advantage": "own.py:f"})
    with pytest.raises(UserError, match="1 with dynamic sampling"):
        Config.build({"sampling.group_size": 1, "algo.advantage": "own.py:f"})


def test_a_function_that_is_missing_is_met_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("dapo_rl.run.backend.load_model", lambda *_: pytest.fail("the model is loaded"))
    for key in ("algo.loss", "algo.advantage"):
        with pytest.raises(UserError, match="has no 'scipo'"):
            DAPOTrainer(config={key: f"{EXAMPLE}:scipo"}, run_dir=tmp_path)


def test_the_examples_loss_by_hand():
    new, old, advantages, mask = inputs()
    losses = build_losses(AlgoSettings(loss=f"{EXAMPLE}:cispo"))(new, old, advantages, mask, **BOUNDS)
    weights = torch.exp(torch.tensor([[0.1, -0.5, 0.0], [0.0, 0.2, -0.5]])).clamp(max=1.28)
    expected = -weights * torch.tensor([[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]])
    torch.testing.assert_close(losses, expected * new.detach().nan_to_num())
    losses.sum().backward()
    torch.testing.assert_close(new.grad, expected)  # the weight has no gradient of its own
    beyond = (torch.tensor([[2.0]], requires_grad=True), torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1).bool())
    assert policy_token_losses(*beyond, **BOUNDS).item() == pytest.approx(-1.28)  # no gradient in DAPO's


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"algo.loss": "cispo"}, {"algo.advantage": "against_the_batch"}])
def test_the_example_trains(tmp_path, settings):
    named = {key: f"{EXAMPLE}:{name}" for key, name in settings.items()}
    trainer = DAPOTrainer(
        config=named
        | {
            **{"train.steps": 2, "train.mini_batches": 1, "sampling.prompts_per_step": 2, "sampling.group_size": 4},
            "sampling.max_new_tokens": 24,
            **{"reward.workers": 0, "sampling.dynamic": False, "data.train": {"source": "arithmetic", "size": 20}},
        },
        run_dir=tmp_path / "run",
    )
    assert trainer.train()["finished"]
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["algo"]
    assert {f"algo.{key}": settings[key] for key in ("loss", "advantage")} == DEFAULTS | named


def test_a_loss_takes_columns_and_facts_of_samples_by_name(tmp_path):
    body = (
        "f.seen = {'teacher': teacher_logps, 'ref': ref_logps, 'behaviour': behaviour_logps, 'entropy': entropy,"
        " 'correct': correct, 'group': group}\n    return new_logps * 1"
    )
    names = "teacher_logps, ref_logps, behaviour_logps, entropy, correct, group"
    (tmp_path / "mine.py").write_text(f"def f(new_logps, old_logps, advantages, mask, *, {names}):\n    {body}\n")
    samples = [
        sample.replace(teacher_logps=-0.25 * (i + 1), ref_logps=-0.5, scalars={"correct": i == 1, "group": 7 + i})
        for i, sample in enumerate(samples_for(small_model(), count=2))
    ]
    policy = make_policy(small_model(), loss=f"{tmp_path}/mine.py:f")
    policy.update(samples, lr=0.0)
    seen = policy._losses._function.seen
    lengths = [len(sample.token_ids) for sample in samples]
    order = seen["group"].argsort()
    assert seen["group"][order].tolist() == [7, 8]
    assert seen["correct"][order].tolist() == [False, True]
    for row, (i, length) in zip(order.tolist(), enumerate(lengths), strict=True):
        assert seen["teacher"][row, :length].tolist() == [-0.25 * (i + 1)] * length
        assert not seen["teacher"][row, length:].any()
        assert seen["behaviour"][row, :length].tolist() == samples[i].logps.tolist()
        assert (seen["entropy"][row, :length] > 0).all()
    assert seen["entropy"].requires_grad


@pytest.mark.parametrize("packed", [True, False])
def test_the_entropy_of_a_loss_has_its_gradient(tmp_path, packed):
    """An entropy bonus of a custom loss has the gradient that autograd finds through full logits."""
    bonus = "def f(new_logps, old_logps, advantages, mask, *, entropy):\n    return -0.3 * entropy + 0.5 * new_logps"
    samples = samples_for(small_model(), masked=(2,))
    policy = make_policy(small_model(), 10**6, {"lr": 1e-3, "packed": packed}, loss=own(tmp_path, bonus))
    ours = gradient(policy, samples)

    model, trained = small_model(), [sample for sample in samples if sample.trained_tokens]
    stats = response_logps(model, trained, 1.0, 0, entropy_grad=True)
    (torch.where(stats.mask, -0.3 * stats.entropy + 0.5 * stats.logps, 0.0).sum() / stats.mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), policy._train.max_grad_norm)
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)
    only_logps = own(tmp_path, bonus.replace("-0.3 * entropy +", "0 * entropy +"))
    other = gradient(make_policy(small_model(), 10**6, {"lr": 1e-3, "packed": packed}, loss=only_logps), samples)
    assert not torch.allclose(other, ours, atol=1e-5)
