"""Every generated token is in exactly one column, whatever the policies."""

from collections import Counter
from itertools import product

import pytest
from support import Prompts, ScriptedEngine, TextVerifier, make_sample

from dapo_rl.config import Config
from dapo_rl.engines.protocol import SamplingParams
from dapo_rl.errors import CapReachedError
from dapo_rl.rollout.sampler import Sampler
from dapo_rl.train.batch import make_batch
from dapo_rl.train.ledger import Ledger

KINDS = [["right"] * 3, ["right", "wrong", "wrong"], ["wrong"] * 3, ["right", "crash", "wrong"], ["wrong", "right"] * 2]
POLICIES = [{"sampling.ahead": 2.0}, {"sampling.ahead": 2.0, "sampling.max_staleness": 2}]
POLICIES += [
    {"sampling.surplus": surplus, **more}
    for surplus, more in product(
        ("carry", "requeue", "drop"),
        (
            {},
            {"sampling.cap": 6, "sampling.on_cap": "partial"},
            {"sampling.cap": 6, "sampling.on_cap": "fill"},
            {"sampling.dynamic_batch": True},
            {"sampling.dynamic": False},
            {"sampling.metric": "score"},
            {"sampling.max_staleness": 0},
            {"sampling.max_staleness": 2},
            {"overlong.mask_truncated": True},
        ),
    )
]


def script(request):
    n = int(request.id.removeprefix("draw-"))
    texts = KINDS[n * 7 % len(KINDS)][:3]
    lengths = [3 + (n * 5 + i * 11) % 37 for i in range(3)]
    reasons = ["length" if length > 30 else "stop" for length in lengths]
    return [make_sample(length, reason, text) for length, reason, text in zip(lengths, reasons, texts, strict=True)]


@pytest.mark.parametrize("width", [3, 12, 10**6])
@pytest.mark.parametrize("changes", POLICIES, ids=lambda c: " ".join(f"{k.split('.')[1]}={v}" for k, v in c.items()))
def test_the_columns_add_up_under_every_policy(changes, width):
    config = Config.build({"sampling.group_size": 3, "sampling.prompts_per_step": 4, **changes})
    engine = ScriptedEngine(script, width)
    sampler = Sampler(
        Prompts(), engine, TextVerifier(), SamplingParams(64), config.sampling, cap=config.sampling_cap, seed=0,
        keep=lambda group: group.draw % 7 != 3,
    )  # fmt: skip
    ledger = Ledger()
    for step in range(1, 7):
        try:
            fill = sampler.fill(4)
        except CapReachedError:
            break
        ledger.add(fill, make_batch(fill.kept, config, engine.version))
        columns = Counter(ledger.columns(sampler.carried_tokens, sampler.in_flight_tokens))
        total = columns.pop("total")
        assert total == columns.total() == engine.tokens
        assert all(count >= 0 for count in columns.values())
        engine.receive(step)
    assert columns["trained"] > 0
    if config.overlong.mask_truncated:
        assert columns["masked_truncated"] > 0
    assert columns["filtered"] > 0
    assert columns["verifier_error"] > 0


def test_samples_that_have_begun_are_carried_and_in_the_total():
    assert Ledger({"total": 10, "trained": 7}).columns(waiting=3, in_flight=5) == {
        "total": 15, "trained": 7, "carried": 8,
    }  # fmt: skip
