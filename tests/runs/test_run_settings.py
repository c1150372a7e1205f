from pathlib import Path

import pytest

from dapo_rl.config import Config, known_keys
from dapo_rl.errors import UserError
from dapo_rl.runs.resume import FREE_TO_CHANGE, check_same_run

RUN = Path("runs/a")


def config(**settings):
    return Config.build({key.replace("__", "."): value for key, value in settings.items()})


def test_the_same_settings_are_the_same_run():
    check_same_run(RUN, config(), config())


@pytest.mark.parametrize(
    "settings",
    [
        {"train__steps": 300},
        {"train__lr": 1e-5, "train__lr_schedule": "linear", "train__warmup_steps": 3},
        {"train__token_budget": 4096, "sampling__cap": 500, "sampling__on_cap": "fill"},
        {"eval__every": 3, "eval__prompts": 7, "checkpoint__every": 2, "checkpoint__keep": 5, "log__rollouts": False},
        {"data__eval": {"source": "arithmetic", "size": 3}},
        {"reward__timeout_s": 9.0},
        {"env__workers": 2, "env__memory_mb": 2048, "env__timeout_s": 9.0, "env__max_error_share": 0.9},
        {"env__port": 8001, "env__host": "0.0.0.0", "env__tls": ("cert.pem", "key.pem"), "env__workers_per_node": 2},
    ],
)
def test_what_is_free_to_change(settings):
    check_same_run(RUN, config(data__eval="a.jsonl"), config(**{"data__eval": "a.jsonl", **settings}))


def test_a_teachers_server_may_have_moved():
    served, local = (config(teacher__name=name) for name in ("http://a:1/v1", "a"))
    moved = {"timeout_s": 9.0, "retries": 0, "api_key_env": "KEY", "name": "http://b:2/v1"}
    check_same_run(RUN, served, config(**{f"teacher__{key}": value for key, value in moved.items()}))
    with pytest.raises(UserError, match=r"teacher\.name a → http://a:1/v1; start"):
        check_same_run(RUN, local, served)


def test_what_makes_another_run_is_named_before_and_after():
    with pytest.raises(UserError) as error:
        check_same_run(RUN, config(), config(algo__clip_high=0.3, seed=4, train__steps=9))
    assert str(error.value) == (
        "runs/a: was started with different settings: seed 0 → 4, algo.clip_high 0.28 → 0.3; start a new run"
    )


def test_many_changes_are_counted():
    changed = config(seed=1, algo__clip_low=0.1, algo__clip_high=0.3, sampling__group_size=4, train__weight_decay=0.5,
                     sampling__temperature=0.5, model__name="other")  # fmt: skip
    with pytest.raises(UserError, match=r" and 2 more; start a new run"):
        check_same_run(RUN, config(), changed)


def test_a_source_that_becomes_another_kind_is_noticed():
    before, after = config(data__train={"source": "arithmetic", "digits": 2}), config(data__train="rows.jsonl")
    for one, other in ((before, after), (after, before)):
        with pytest.raises(UserError, match=r"data\.train"):
            check_same_run(RUN, one, other)


def test_auto_is_compared_once_it_is_known():
    check_same_run(RUN, config(model__dtype="float32"), config(model__dtype="auto"))
    with pytest.raises(UserError, match=r"model\.dtype float32 → bfloat16"):
        check_same_run(RUN, config(model__dtype="float32"), config(model__dtype="bfloat16"))


def test_every_free_key_is_a_key():
    for free in FREE_TO_CHANGE:
        assert any(key == free or key.startswith(free) for key in known_keys()), free
