"""Reward models: scores, what they read, and mistakes."""

import math

import pytest
import torch
from reward_models import classifier, save_classifier, save_language_model, words_with
from support import make_prompt, tokenizer

from dapo_rl.config import Config, RewardSettings
from dapo_rl.envs import OneTurn
from dapo_rl.errors import UserError
from dapo_rl.rewards import as_verifier, build_verifier
from dapo_rl.rewards.model_verifier import Exchange, GivenModel, ModelVerifier
from dapo_rl.rewards.pool import VerifierPool
from dapo_rl.rewards.served import MixedVerifier
from dapo_rl.rollout.reward_model import RewardModel, load_reward_models
from dapo_rl.types import Prompt, Trajectory

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
TEXTS = ("7", "1+1=2\nAnswer: 2", "12-3=9", "8+8=?\n8+8=16\nAnswer: 16\n" * 2, "", "0")


def pool_for(verifier, *settings):
    config = Config.load("demo", list(settings))
    pool = VerifierPool(build_verifier(RewardSettings(verifier=verifier, workers=0)), config.reward)
    load_reward_models(pool, config, torch.device("cpu"))
    return pool


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("rm") / "model"
    return path, save_classifier(path)


@torch.no_grad()
def alone(model, text):
    """The model's own score of one text, without padding."""
    return float(model(torch.tensor([tokenizer()(text, add_special_tokens=False).input_ids])).logits[0, 0])


def test_scores_are_the_model_s_own_whatever_is_in_the_batch(saved):
    path, model = saved
    samples = [Trajectory.of_text(text) for text in TEXTS]
    prompt = make_prompt("p", "8+8=?\n")
    expected = [alone(model, prompt.text + text) for text in TEXTS]
    assert len({round(score, 4) for score in expected}) == len(TEXTS)
    for budget in (1, 40, 10_000):
        scorer = RewardModel(model, words_with(template=None), budget, "rm")
        exchanges = [Exchange([], [], prompt.text + text) for text in TEXTS]
        assert scorer.score([exchanges]) == [pytest.approx(expected, abs=1e-5)]
        assert scorer.score([exchanges[:2], exchanges[2:]]) == [
            pytest.approx(expected[:2], abs=1e-5),
            pytest.approx(expected[2:], abs=1e-5),
        ]
    pool = pool_for(f"model:{path}")
    for some in (samples, samples[:1], samples[3:], [*samples, *samples]):
        scores = [verdict.score for verdict in pool(prompt, some)]
        texts = [each.text for each in some]
        assert scores == pytest.approx([expected[TEXTS.index(text)] for text in texts], abs=1e-5)
    assert [v.score for v in pool(prompt, samples)] == [v.score for v in pool(prompt, samples)]


def test_the_prefix_that_a_group_shares_is_computed_once(saved):
    _, model = saved
    scorer, computed = RewardModel(model, words_with(template=None), 10_000, "rm"), []
    hook = model.base_model.layers[0].register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0].shape[1]))
    scorer.score([[Exchange([], [], prompt + answer) for answer in "123"] for prompt in ("8+8=?", "12-7+1=?")])
    hook.remove()
    lengths = [len(tokenizer()(prompt, add_special_tokens=False).input_ids) for prompt in ("8+8=?", "12-7+1=?")]
    assert computed == [length + 3 for length in lengths]


def test_a_score_above_the_threshold_is_correct(saved):
    path, _ = saved
    samples = [Trajectory.of_text(text) for text in TEXTS]
    scores = sorted(verdict.score for verdict in pool_for(f"model:{path}")(make_prompt("p"), samples))
    middle = (scores[2] + scores[3]) / 2
    verifier = build_verifier(RewardSettings(verifier=f"model:{path}", threshold=middle))
    pool = VerifierPool(verifier, RewardSettings(workers=0))
    load_reward_models(pool, Config.load("demo"), torch.device("cpu"))
    verdicts = pool(make_prompt("p"), samples)
    assert [v.correct for v in verdicts] == [v.score > middle for v in verdicts]
    assert sum(v.correct for v in verdicts) == 3
    assert {v.parts[0].name for v in verdicts} == {"model"}


def test_a_threshold_of_0_replaces_the_default():
    class Fixed:
        def score(self, groups):
            return [[float(each.said[0]["content"]) for each in group] for group in groups]

        def release_memory(self):
            pass

    verifier = ModelVerifier(GivenModel("fixed"), RewardSettings(threshold=0), "fixed")
    verifier.load(lambda given: Fixed())
    samples = [Trajectory.of_text(text) for text in ("0", "0.1")]
    assert [v.correct for v in verifier(make_prompt("p"), samples)] == [False, True]


def test_groups_that_wait_are_scored_together_and_dropped_ones_never():
    asked = []

    class Counting:
        def score(self, groups):
            asked.append(groups)
            return [[float(each.said[0]["content"]) for each in group] for group in groups]

        def release_memory(self):
            pass

    verifier = ModelVerifier(GivenModel("counting"), RewardSettings(), "counting")
    verifier.load(lambda given: Counting())
    first, dropped, third = (verifier.submit(make_prompt("p"), [Trajectory.of_text(text)] * 2) for text in "123")
    del dropped
    assert [v.score for v in third.result()] == [3, 3]
    assert [v.score for v in first.result()] == [1, 1]
    assert [[[each.said[0]["content"] for each in group] for group in groups] for groups in asked] == [[["1"], ["3"]]]


def test_whether_a_dropped_group_was_scored_before_makes_no_difference(saved):
    path, _ = saved
    (verifier,) = pool_for([{"verifier": f"model:{path}"}]).served
    known = []
    late = verifier.submit(make_prompt("p"), [Trajectory.of_text("1")], lambda: bool(known))
    other = verifier.submit(make_prompt("p"), [Trajectory.of_text("2")])
    assert len(other.result()) == len(late.result()) == 1
    known.append("the workers' verdicts, which drop it")
    assert late.result() == []


def test_a_group_that_others_drop_is_not_scored():
    asked = []

    class Counting:
        def score(self, groups):
            asked.extend(each.said[0]["content"] for group in groups for each in group)
            return [[0.5 for _ in group] for group in groups]

        def release_memory(self):
            pass

    verifier = MixedVerifier(
        [build_verifier(RewardSettings(verifier="math")), ModelVerifier(GivenModel("rm"), RewardSettings(), "rm")],
        [1.0, 2.0],
        ["math", "rm"],
        [None, None],
        RewardSettings(),
        {},
    )
    prompt = make_prompt("p", answer="2")
    pool = VerifierPool(verifier, RewardSettings(workers=0))
    pool.load_models(lambda given: Counting())
    judge = OneTurn(pool, drops=lambda verdicts: len({verdict.correct for verdict in verdicts}) == 1)

    def group(*numbers):
        return judge.step(prompt, [Trajectory.of_text(f"Answer: {number}") for number in numbers])

    wrong, mixed, right = group(3, 4), group(2, 5), group(2, 2.0)
    assert [[part.name for part in verdict.parts] for verdict in mixed.result()] == [["math", "rm"]] * 2
    assert [verdict.score for verdict in mixed.result()] == [2.0, 0.0]
    for dropped in (wrong, right):
        assert [[part.name for part in verdict.parts] for verdict in dropped.result()] == [["math"]] * 2
    assert [verdict.correct for verdict in wrong.result()] == [False, False]
    assert asked == ["Answer: 2", "Answer: 5"]
    for all_scored in (OneTurn(pool).step(prompt, [Trajectory.of_text("3")]), pool.submit(prompt, [])):
        all_scored.result()
    assert asked[2:] == ["3"]


def test_a_model_that_decides_what_is_correct_scores_every_group(saved):
    path, _ = saved
    pool = pool_for([{"verifier": f"model:{path}"}, {"verifier": "math"}])
    ticket = pool.submit(make_prompt("p", answer="2"), [Trajectory.of_text("3")] * 2, drops=lambda verdicts: True)
    assert [len(verdict.parts) for verdict in ticket.result()] == [2, 2]


@pytest.mark.parametrize(
    ("prompt", "sample", "text"),
    [
        (make_prompt("p", "1+1=?\n"), Trajectory.of_text("2"), "<user>1+1=?\n\n<assistant>2\n"),
        (
            Prompt("p", "<s>1+1=?", (1,), messages=({"role": "user", "content": "1+1"},)),
            Trajectory.of_text("2"),
            "<user>1+1\n<assistant>2\n",
        ),
        # The policy's own template is not part of the question.
        (Prompt("p", "<s>1+1=?</s>", (1,), question="1+1"), Trajectory.of_text("2"), "<user>1+1\n<assistant>2\n"),
    ],
)
def test_a_model_with_a_template_reads_a_conversation(tmp_path, prompt, sample, text):
    model = save_classifier(tmp_path / "rm", template=TEMPLATE)
    (verdict,) = pool_for(f"model:{tmp_path / 'rm'}")(prompt, [sample])
    assert verdict.score == pytest.approx(alone(model, text), abs=1e-5)
    assert verdict.score != pytest.approx(alone(model, prompt.text + sample.text), abs=1e-5)


def test_what_cannot_be_scored_is_an_error_and_not_wrong(tmp_path):
    save_classifier(tmp_path / "rm", max_position_embeddings=16)
    samples = [Trajectory.of_text("2"), Trajectory.of_text("1+" * 30)]
    good, long = pool_for(f"model:{tmp_path / 'rm'}")(make_prompt("p"), samples)
    assert not good.failed
    assert long.failed
    assert "tokens exceed its context of 16" in long.detail
    save_classifier(tmp_path / "strict", template="{{ raise_exception('no') }}")
    (verdict,) = pool_for(f"model:{tmp_path / 'strict'}")(make_prompt("p"), samples[:1])
    assert verdict.failed
    assert "its chat template cannot render a sample" in verdict.detail
    broken = classifier()
    with torch.no_grad():
        broken.score.weight.fill_(math.inf)
    verifier = as_verifier([GivenModel(broken, tokenizer())], RewardSettings(workers=0))
    pool = VerifierPool(verifier, RewardSettings(workers=0))
    load_reward_models(pool, Config.load("demo"), torch.device("cpu"))
    assert all(v.failed and "is not finite" in v.detail for v in pool(make_prompt("p"), samples[:1]))


def test_mistakes_are_one_line(tmp_path):
    save_language_model(tmp_path / "lm")
    save_classifier(tmp_path / "three", labels=3)
    for name, line in (
        ("lm", r"^reward\.verifier: .*lm has no classification head \(score\.weight is not among its weights\): it is"),
        ("three", r"^reward\.verifier: .*three has 3 labels; a reward model has one, the score"),
        ("none", r"^reward\.verifier: no directory .*none"),
    ):
        with pytest.raises(UserError, match=line) as error:
            pool_for(f"model:{tmp_path / name}")
        assert "\n" not in str(error.value)
    verifier = as_verifier([GivenModel(classifier(2), tokenizer())], RewardSettings(workers=0))
    pool = VerifierPool(verifier, RewardSettings(workers=0))
    with pytest.raises(UserError, match=r"^reward\.verifier: LlamaForSequenceClassification has 2 labels"):
        load_reward_models(pool, Config.load("demo"), torch.device("cpu"))
    pool = VerifierPool(as_verifier([GivenModel(classifier())], RewardSettings()), RewardSettings(workers=0))
    with pytest.raises(UserError, match=r"has no tokenizer; give it in reward_processing_classes"):
        load_reward_models(pool, Config.load("demo"), torch.device("cpu"))


def says_nothing(completions, **columns):
    return [None if completion == "7" else 0.25 for completion in completions]


def test_a_list_adds_up_as_it_does_with_functions_alone(saved):
    path, model = saved
    samples = [Trajectory.of_text(text) for text in ("7", "Answer: 2")]
    prompt = make_prompt("p", "1+1=?\n")
    ones = [alone(model, prompt.text + sample.text) for sample in samples]
    functions = [says_nothing, GivenModel(str(path)), "math"]
    verifier = as_verifier(functions, RewardSettings(workers=0), weights=[2.0, 0.5, 1.0])
    assert isinstance(verifier, MixedVerifier)
    pool = VerifierPool(verifier, RewardSettings(workers=0))
    load_reward_models(pool, Config.load("demo"), torch.device("cpu"))
    first, second = pool(prompt, samples)
    assert (first.score, second.score) == pytest.approx((0.5 * ones[0] - 1, 0.5 + 0.5 * ones[1] + 1), abs=1e-5)
    assert [part.name for part in second.parts] == ["says_nothing", "model", "math"]
    # The first that applies decides: the model on the first sample, the function, which is below 0.5, on the second.
    assert (first.correct, second.correct) == (ones[0] > 0.5, False)
    assert [v.score for v in verifier(prompt, samples)] == [first.score, second.score]


def test_one_failure_fails_the_sample(saved):
    path, _ = saved

    def broken(completions, **columns):
        raise ValueError("no")

    pool = VerifierPool(as_verifier([GivenModel(str(path)), broken], RewardSettings()), RewardSettings(workers=0))
    load_reward_models(pool, Config.load("demo"), torch.device("cpu"))
    (verdict,) = pool(make_prompt("p"), [Trajectory.of_text("2")])
    assert verdict.status == "error"
    assert "ValueError" in verdict.detail
