"""Sources whose weights follow their informative groups: shares by hand, the floor, and exact resumes."""

import random
from collections import Counter
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SMALL

from dapo_rl import Config, DAPOTrainer
from dapo_rl.cli import DEFAULT_RECIPE
from dapo_rl.data import MixedStream, PromptStream
from dapo_rl.data.informative_mixture import InformativeMixture
from dapo_rl.errors import UserError
from dapo_rl.runs.directory import RunDirectory
from dapo_rl.types import Prompt

NEVER_FADES = 10**9


def parts(weights, seed=0):
    names = [f"s{at}" for at in range(len(weights))]
    prompts = {
        name: [Prompt(id=f"{name}:{n}", text="", token_ids=(n,), origin=name) for n in range(7)] for name in names
    }
    streams = {name: PromptStream(prompts[name], seed, name) for name in names}
    return streams, dict(zip(names, weights, strict=True)), 7 * len(names)


def mixture(weights, batch=NEVER_FADES, seed=0):
    return InformativeMixture(*parts(weights, seed), batch)


def see(stream, origin, informative, groups=1):
    for _ in range(groups):
        stream.observe(Prompt(id=f"{origin}:0", text="", token_ids=(0,), origin=origin), 1, 2, informative)


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 1, 2)])
def test_without_observations_it_is_the_mixture_with_fixed_weights(weights):
    fixed, follows = MixedStream(*parts(weights)), mixture(weights)
    assert [p.id for p in islice(follows, 50)] == [p.id for p in islice(fixed, 50)]


def test_shares_by_hand():
    stream = mixture([1, 2, 1])
    see(stream, "s0", informative=True, groups=3)  # (3 + 1) / (3 + 1) = 1
    see(stream, "s1", informative=False, groups=3)  # (0 + 1) / (3 + 1) = 1/4, times its weight 2
    assert stream.shares() == pytest.approx({"s0": 1 / 2.5, "s1": 0.5 / 2.5, "s2": 1 / 2.5}, rel=1e-6)
    assert Counter(p.origin for p in islice(stream, 50)) == {"s0": 20, "s1": 10, "s2": 20}


def test_a_source_that_teaches_nothing_is_drawn_from_now_and_then():
    stream = mixture([1, 1])
    see(stream, "s1", informative=False, groups=1000)
    assert stream.shares()["s1"] == pytest.approx(0.1 / 1.1)
    assert Counter(p.origin for p in islice(stream, 110))["s1"] == 10


def test_what_was_seen_long_ago_fades():
    stream = mixture([1, 1], batch=1)
    see(stream, "s1", informative=False, groups=50)
    low = stream.shares()["s1"]
    see(stream, "s1", informative=True, groups=50)
    assert low < 0.2 < 0.45 < stream.shares()["s1"] < 0.5


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 60), st.integers(0, 2**40))
def test_it_resumes_exactly(before, seed):
    dice = random.Random(seed)
    stream = mixture([1, 2.5, 0.5], batch=2, seed=seed)
    for _ in range(before):
        see(stream, stream.draw().origin, informative=dice.random() < 0.4)
    with TemporaryDirectory() as directory:
        stream.save(Path(directory))
        resumed = mixture([1, 2.5, 0.5], batch=2, seed=seed)
        resumed.load(Path(directory))
    for _ in range(40):
        prompt, good = stream.draw(), dice.random() < 0.5
        assert resumed.draw().id == prompt.id
        for each in (stream, resumed):
            see(each, prompt.origin, good)
    assert resumed.shares() == stream.shares()


def test_the_setting_of_a_checkpoint_stays():
    fixed, follows = MixedStream(*parts([1, 1])), mixture([1, 1])
    with pytest.raises(UserError, match=r"^sampling\.source_weights was `fixed` when the checkpoint was written"):
        follows.restore(fixed.state())
    with pytest.raises(UserError, match=r"^sampling\.source_weights was `informative` when the checkpoint was written"):
        fixed.restore(follows.state())
    state = follows.state()
    with pytest.raises(ValueError, match="seen"):
        follows.restore(state | {"seen": {"s0": [2.0, 1.0], "s1": [0.0, 0.0]}})


SOURCES = (
    "data.train=[{source: arithmetic, size: 40, max_terms: 2, weight: 1}, "
    "{source: arithmetic, size: 40, min_terms: 8, max_terms: 9, weight: 1}]"
)
RUN = (*SMALL, SOURCES, "sampling.source_weights=informative", "train.steps=4", "eval.every=null", "data.eval=null")


def trainer_for(path, *more):
    return DAPOTrainer(config=Config.load(DEFAULT_RECIPE, [*RUN, "data.max_prompt_tokens=64", *more]), run_dir=path)


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["uniform", "informative"])
def test_a_run_draws_less_from_what_is_too_hard_and_resumes(tmp_path, selection):
    """Nine terms are more than the model can add, so that no group of theirs has a signal."""
    more = (f"sampling.selection={selection}",)
    with trainer_for(tmp_path / "whole", *more) as trainer:
        trainer.train()
    with trainer_for(tmp_path / "run", *more) as trainer:
        trainer.stop_requested = lambda: trainer._run.progress.step == 2
        trainer.train()
    with trainer_for(tmp_path / "run", *more) as trainer:
        trainer.train(resume=True)
        stream = trainer._run.sampler._prompts
        shares = getattr(stream, "_stream", stream).shares()
    assert min(shares.values()) < 0.35
    whole, run = (RunDirectory(tmp_path / name).read_metrics() for name in ("whole", "run"))
    for ours, theirs in zip(run, whole, strict=True):
        drawn = [name for name in ours if name.startswith(("data/", "sampling/"))]
        assert [ours[name] for name in drawn] == [theirs[name] for name in drawn]


def test_it_needs_sources_with_weights(tmp_path):
    with pytest.raises(UserError, match=r"^sampling\.source_weights: informative needs a list of sources with weights"):
        trainer_for(tmp_path / "run", "data.train=arithmetic").close()
