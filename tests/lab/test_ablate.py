"""What an ablation compares, and how its numbers come about."""

import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support import REPOSITORY

from dapo_rl.config import PRESETS, Config
from dapo_rl.config.recipe import flat
from dapo_rl.errors import UserError
from dapo_rl.lab.ablate.ablation import run_ablation
from dapo_rl.lab.ablate.display import LiveAblationDisplay, PlainAblationDisplay
from dapo_rl.lab.ablate.plan import AblationPlan, arms_of, check_same_plan, grid, paper_table
from dapo_rl.lab.ablate.plot import ablation_figure, draw_ablation
from dapo_rl.lab.ablate.report import ablation_json, ablation_table, markdown, print_ablation
from dapo_rl.lab.ablate.results import at_end, collect
from dapo_rl.lab.ablate.runs import all_runs
from dapo_rl.lab.ablate.statistics import t_interval, t_quantile
from dapo_rl.lab.ablate.techniques import TECHNIQUES
from dapo_rl.recipes import packaged_recipe
from dapo_rl.runs.directory import RunDirectory

DEFAULT = packaged_recipe("demo")
PAPER = packaged_recipe("dapo-math-qwen2.5-32b")
BASES = [
    (DEFAULT, []),
    (PAPER, []),
    (DEFAULT, ["preset=grpo"]),
    (DEFAULT, ["preset=dr_grpo"]),
    (DEFAULT, ["algo.clip_low=0.1", "algo.clip_high=0.4", "algo.aggregation=token-mean-per-group"]),
    (DEFAULT, ["sampling.dynamic_batch=true", "overlong.factor=0.5"]),
]


def differing(one, other):
    before, after = flat(one.settings), flat(other.settings)
    assert before.keys() == after.keys()
    return {key for key in before if before[key] != after[key]}


@pytest.mark.parametrize(("recipe", "overrides"), BASES)
def test_neighbours_differ_in_one_technique_and_nothing_else(recipe, overrides):
    plan = paper_table(recipe, overrides, 1)
    assert len(plan.arms) == 11
    pairs = [(plan.arm(arm.compared_with), arm) for arm in plan.arms if arm.compared_with]
    assert len(pairs) == 10
    for (before, arm), technique in zip(pairs, [*TECHNIQUES, *TECHNIQUES], strict=True):
        keys = differing(before, arm)
        assert keys, arm.label
        assert keys <= set(technique.off), arm.label
        assert set(technique.on) <= keys, arm.label
        assert keys == set(arm.changes)
        adds = arm.part == "ladder"
        assert technique.is_on(arm.config(0)) is adds
        assert technique.is_on(before.config(0)) is not adds
        assert technique.name in arm.label


@pytest.mark.parametrize(("recipe", "overrides"), BASES)
def test_the_first_arm_has_no_technique_and_full_dapo_has_all(recipe, overrides):
    arms = paper_table(recipe, overrides, 1).arms
    assert not any(technique.is_on(arms[0].config(0)) for technique in TECHNIQUES)
    assert all(technique.is_on(arms[5].config(0)) for technique in TECHNIQUES)
    assert arms[0].config(0).algo.clip_high == arms[0].config(0).algo.clip_low


def test_the_table_of_techniques_agrees_with_the_presets():
    grpo = {f"{section}.{key}": value for section, keys in PRESETS["grpo"].items() for key, value in keys.items()}
    switches = {key for technique in TECHNIQUES for key in technique.on}
    naive = flat(paper_table(DEFAULT, [], 1).arms[0].settings)
    for key in switches & set(grpo):
        assert naive[key] == grpo[key]
    assert set(grpo) - switches == {"algo.kl_coef", "algo.kl_kind"}
    defaults = flat(Config().resolved())
    assert {t.name for t in TECHNIQUES if any(defaults[key] != value for key, value in t.on.items())} == {
        "Overlong Filtering"  # the authors' published script does without it
    }


def test_the_papers_table():
    arms = paper_table(DEFAULT, [], 1).arms
    assert [(arm.label, arm.paper) for arm in arms[:6]] == [
        ("Naive GRPO", 30),
        ("+ Overlong Filtering", 36),
        ("+ Clip-Higher", 38),
        ("+ Soft Overlong Punishment", 41),
        ("+ Token-level Loss", 42),
        ("+ Dynamic Sampling (DAPO)", 50),
    ]
    assert all(arm.paper is None for arm in arms[6:])


def test_the_documentation_has_the_table_of_techniques():
    text = (REPOSITORY / "docs" / "ablation.md").read_text()
    for technique in TECHNIQUES:
        on, off = (
            ", ".join(f"`{key}={shown(value)}`" for key, value in settings.items())
            for settings in (technique.on, technique.off)
        )
        assert f"| {technique.name} | {on} | {off} | {technique.paper} |" in text


def shown(value):
    return value["product"][0] if isinstance(value, dict) else json.dumps(value).strip('"')


def test_an_arm_with_the_settings_of_another_has_its_runs():
    plan = paper_table(DEFAULT, [], 2)
    assert plan.arms[-1].label == "DAPO without Dynamic Sampling"
    assert plan.arms[-1].directory == plan.arms[4].name
    assert len(plan.with_own_runs()) == 10


def test_a_recipes_own_values_stay_where_it_has_the_technique():
    plan = paper_table(DEFAULT, ["algo.clip_high=0.35", "overlong.factor=0.5", "seed=7"], 2)
    assert [arm.config(0).algo.clip_high for arm in plan.arms[:3]] == [0.2, 0.2, 0.35]
    assert {arm.config(0).overlong.factor for arm in plan.arms} == {0.5}
    assert plan.seeds == (7, 8)


def test_more_seeds_follow_those_that_the_plan_has(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("dapo_rl.lab.ablate.ablation._run", lambda plan, *_: started.append(plan) or 0)
    paper_table(DEFAULT, ["seed=7"], 2).save(tmp_path / "plan.json")
    assert run_ablation(None, [], out=tmp_path, seeds=3) == 0
    assert [plan.seeds for plan in started] == [(7, 8, 9)]


def test_parts_of_the_table():
    ladder = paper_table(DEFAULT, [], 1, ("ladder",))
    assert [arm.part for arm in ladder.arms] == ["ladder"] * 6
    left_out = paper_table(DEFAULT, [], 1, ("leave-one-out",))
    assert left_out.arms[0].label == "+ Dynamic Sampling (DAPO)"
    assert [arm.compared_with for arm in left_out.arms] == [None, *[left_out.arms[0].name] * 5]
    assert all(arm.directory == arm.name for arm in left_out.arms)


def test_any_key_can_be_varied():
    plan = grid(DEFAULT, ["train.steps=5"], 1, ["algo.clip_high=0.2,0.28", "overlong.shape=soft,off"])
    assert [(a.config(0).algo.clip_high, a.config(0).overlong.shape) for a in plan.arms] == [
        (0.2, "soft"),
        (0.2, "off"),
        (0.28, "soft"),
        (0.28, "off"),
    ]
    assert plan.arms[1].label == "algo.clip_high=0.2, overlong.shape=off"
    assert plan.arms[3].changes == {"algo.clip_high": 0.28, "overlong.shape": "off"}
    assert {a.compared_with for a in plan.arms[1:]} == {plan.arms[0].name}
    assert {a.config(0).train.steps for a in plan.arms} == {5}
    presets = grid(DEFAULT, [], 1, ["preset=dapo,grpo"])
    assert [a.config(0).sampling.dynamic for a in presets.arms] == [True, False]
    rates = grid(DEFAULT, [], 1, ["train.lr=1e-4,2e-4"])
    assert [a.config(0).train.lr for a in rates.arms] == [1e-4, 2e-4]


def test_directories_have_plain_names_whatever_is_varied():
    plan = grid(DEFAULT, [], 1, ["data.train=../../a b/$(x).jsonl,../../A B/$(x).jsonl"])
    assert len({arm.name for arm in plan.arms}) == 2
    for arm in plan.arms:
        assert Path(arm.name).parts == (arm.name,)
        assert not set(arm.name) & set("/\\$ ()=")
        assert not arm.name.startswith(".")


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        (["algo.clip_high=0.28,1.5"], "--vary algo.clip_high=1.5: algo.clip_high: 1.5 is outside"),
        (["algo.clip_hihg=0.28"], "did you mean algo.clip_high?"),
        (["algo.clip_high"], "is not KEY=VALUE"),
        (["algo.clip_high="], "is not KEY=VALUE"),
        (["algo.clip_high=0.2,0.20"], "gives the same settings"),
        (["algo.clip_high=0.2", "algo.clip_high=0.3"], "appears twice"),
        (["seed=1,2"], "--seeds"),
        (["train.lr=[1,2"], "is not a value"),
        (["train.steps=" + ",".join(str(n) for n in range(1, 302))], "301 combinations"),
    ],
)
def test_mistakes_in_vary_are_told_before_anything_starts(vary, words):
    with pytest.raises(UserError) as error:
        grid(DEFAULT, [], 1, vary)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


DATA = ["data.train=arithmetic", "data.eval=held-out.jsonl"]


def test_arms_of_several_settings():
    words = ["", "algo.clip_high=0.28 train.lr=1e-4", " preset=vapo   critic.lambda_lowest=0.5 "]
    plan = arms_of(DEFAULT, ["train.steps=5"], 2, words)
    labels = ["the recipe", "algo.clip_high=0.28, train.lr=0.0001", "preset=vapo, critic.lambda_lowest=0.5"]
    assert [arm.label for arm in plan.arms] == labels
    assert [arm.compared_with for arm in plan.arms] == [None, "the-recipe", "the-recipe"]
    assert plan.arms[1].changes == {"train.lr": 0.0001}  # the demo has Clip-Higher
    assert plan.arms[0].settings == Config.load(DEFAULT, ["train.steps=5"]).resolved()
    vapo = plan.arms[2].config(1)
    assert (vapo.critic.lambda_lowest, vapo.train.steps, vapo.seed) == (0.5, 5, 1)
    assert plan._is_valid()
    values = ["algo.clip_high=0.2", "algo.clip_high=0.4"]
    assert arms_of(DEFAULT, [], 1, values) == grid(DEFAULT, [], 1, ["algo.clip_high=0.2,0.4"])


@pytest.mark.parametrize(
    ("arms", "words"),
    [
        (["train.lr"], "'train.lr' is not KEY=VALUE"),
        (["train.lr=1e-4 'a"], "no closing quotation"),
        (["train.lr=1e-4 seed=3"], "use --seeds"),
        (["", "algo.clip_high=0.28"], "same settings as the recipe"),
        (["train.lr=x"], "--arm train.lr=x: "),
    ],
)
def test_mistakes_in_arms_are_told_before_anything_starts(arms, words):
    with pytest.raises(UserError, match=re.escape(words)):
        arms_of(DEFAULT, [], 1, arms)


def test_arms_and_values_exclude_each_other():
    with pytest.raises(UserError, match="--vary makes them from values; use one"):
        run_ablation(DEFAULT, [], vary=["train.lr=1e-4"], arms=["train.lr=1e-3"])
    with pytest.raises(UserError, match="--arm replaces that table"):
        run_ablation(DEFAULT, [], table="dapo", arms=["train.lr=1e-3"])


@pytest.mark.parametrize(
    ("overrides", "vary"),
    [
        (DATA, "model.name=one,other"),
        (DATA, "model.name=tiny,other"),
        ([*DATA, "model.name=mine"], "train.lr=1e-6,2e-6"),
        ([DATA[1], "model.name=mine"], "data.train=arithmetic,rows.jsonl"),
    ],
)
def test_without_a_recipe_no_arm_has_the_demos_settings_if_one_has_another_model_or_data(overrides, vary):
    default = Config.load()
    plan = grid(None, overrides, 1, [vary])
    assert (plan.name, len(plan.arms)) == ("dapo", 2)
    for arm in plan.arms:
        config = arm.config(0)
        assert (config.data.max_prompt_tokens, config.sampling.max_new_tokens) == (1024, 1024)
        assert config.train.steps == default.train.steps
        assert (config.train.lr_schedule, config.data.eval) == ("constant", "held-out.jsonl")
    assert {key for arm in plan.arms[1:] for key in arm.changes} == {vary.partition("=")[0]}


def test_without_a_recipe_the_demo_is_ablated():
    assert grid(None, [], 1, ["train.lr=1e-4,2e-4"]) == grid(DEFAULT, [], 1, ["train.lr=1e-4,2e-4"])
    assert paper_table(None, ["train.steps=5"], 2) == paper_table(DEFAULT, ["train.steps=5"], 2)
    own = paper_table(None, ["model.name=mine", *DATA], 1)
    assert {arm.config(0).train.steps for arm in own.arms} == {Config.load().train.steps}
    with pytest.raises(UserError, match=r'^--vary model\.name="mine": data\.eval: an ablation compares'):
        grid(None, [], 1, ["model.name=mine"])
    with pytest.raises(UserError, match=r'^--vary model\.name="mine": model\.name=mine: data\.train is not set'):
        grid(None, [DATA[1]], 1, ["model.name=mine"])


def test_mistakes_in_the_rest():
    with pytest.raises(UserError, match=r"sampling\.dynamic: turns Dynamic Sampling off"):
        paper_table(DEFAULT, ["sampling.dynamic=false"], 1)
    with pytest.raises(UserError, match=r"data\.eval: an ablation compares held-out accuracy"):
        paper_table(DEFAULT, ["data.eval=null", "eval.every=null"], 1)


def test_a_plan_comes_back_from_its_file(tmp_path):
    plan = paper_table(DEFAULT, ["train.steps=5"], 2)
    plan.save(tmp_path / "plan.json")
    assert AblationPlan.load(tmp_path / "plan.json") == plan
    (tmp_path / "plan.json").write_text('{"arms": 3}')
    with pytest.raises(UserError, match="cannot be read"):
        AblationPlan.load(tmp_path / "plan.json")


def test_a_directory_holds_one_ablation(tmp_path):
    plan = paper_table(DEFAULT, ["train.steps=5"], 2)
    check_same_plan(tmp_path, plan, paper_table(DEFAULT, ["train.steps=5"], 3))
    check_same_plan(tmp_path, plan, paper_table(DEFAULT, ["train.steps=5", "seed=4"], 3))
    with pytest.raises(UserError, match=r"Naive GRPO with train\.steps 5 → 6"):
        check_same_plan(tmp_path, plan, paper_table(DEFAULT, ["train.steps=6", "checkpoint.every=1"], 2))
    with pytest.raises(UserError, match="holds another ablation: naive-grpo"):
        check_same_plan(tmp_path, plan, grid(DEFAULT, ["train.steps=5"], 2, ["algo.clip_high=0.2,0.3"]))


# Numbers


def test_students_t_as_in_printed_tables():
    for freedom, value in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)):
        assert t_quantile(freedom) == pytest.approx(value, abs=5e-4)
    assert t_quantile(2, 0.9) == pytest.approx(2.920, abs=5e-4)


def test_an_interval_by_hand():
    # 1, 2, 3: mean 2, standard deviation 1, standard error 1/√3, t(2) 4.3027
    assert t_interval([1.0, 2.0, 3.0]) is not None
    result = t_interval([1.0, 2.0, 3.0])
    assert (result.mean, result.n) == (2.0, 3)
    assert result.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert t_interval([0.5]).half_width is None
    two = t_interval([0.5, 0.7])  # Student's t of one degree of freedom is 12.7
    assert (two.mean, two.half_width, two.low, two.high) == (pytest.approx(0.6), None, 0.5, 0.7)
    assert t_interval([0.1 + 0.2, 0.3, 0.3]).half_width is None
    assert t_interval([]) is None


def test_the_end_of_a_run_is_its_last_quarter():
    curve = {0: 9.0, 10: 1.0, 20: 2.0, 30: 3.0, 35: 5.0, 40: 7.0}
    assert at_end(curve, 40) == 6.0  # 35 and 40; 30 is not after three quarters
    assert at_end({0: 9.0, 10: 1.0}, 40) == 1.0
    assert at_end({0: 9.0}, 40) is None


def written(out, plan, accuracies):
    """Runs with given held-out accuracies at steps 3 and 4 of 4; by arm and seed."""
    for arm in plan.with_own_runs():
        for seed in plan.seeds:
            if (end := accuracies[arm.name].get(seed)) is None:
                continue
            run = RunDirectory.create(out / arm.name / f"seed-{seed}", arm.config(seed))
            for step in (1, 2, 3, 4):
                run.append_metrics(
                    step,
                    {
                        "reward/mean": step / 10,
                        "actor/entropy": 1 / step,
                        "response_length/mean": 20.0 + step,
                        "response_length/clip_ratio": 0.05 * step,
                        "eval/accuracy": end,
                    },
                )
            run.write_summary(
                {
                    "finished": True,
                    "steps": 4,
                    "accuracy_before": 0.1,
                    "evaluations": [{"step": s, "accuracy": a} for s, a in ((0, 0.1), (2, 0.2), (4, end))],
                    "wall_seconds": 60.0 + seed,
                    "tokens": {"total": 300, "trained": 200, "all_correct": 100},
                }
            )
    return collect(plan, all_runs(plan, out))


@pytest.fixture
def varied(tmp_path):
    plan = grid(DEFAULT, ["train.steps=4"], 3, ["algo.clip_high=0.2,0.28,0.4"])
    first, second, third = (arm.name for arm in plan.arms)
    accuracies = {
        first: {0: 0.30, 1: 0.40, 2: 0.50},
        second: {0: 0.35, 1: 0.45, 2: 0.61},
        third: {1: 0.30},
    }
    return plan, written(tmp_path, plan, accuracies)


def test_numbers_of_arms_by_hand(varied):
    _, (first, second, third) = varied
    assert first.estimate("accuracy").mean == pytest.approx(0.4)
    assert first.estimate("accuracy").half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert first.difference is None
    # Seed by seed: 0.05, 0.05, 0.11. Mean 0.07, standard deviation √(0.0024/2).
    assert second.difference.mean == pytest.approx(0.07)
    assert second.difference.half_width == pytest.approx(4.302653 * math.sqrt(0.0012 / 3), rel=1e-6)
    assert (third.difference.mean, third.difference.half_width) == (pytest.approx(-0.1), None)
    assert third.estimate("accuracy").n == 1
    # The last quarter of four steps is the fourth.
    assert first.estimate("reward").mean == pytest.approx(0.4)
    assert first.estimate("entropy").mean == pytest.approx(0.25)
    assert first.estimate("response_length").mean == pytest.approx(24)
    assert first.estimate("truncated").mean == pytest.approx(0.2)
    assert first.estimate("generated_per_trained").mean == pytest.approx(1.5)
    assert first.estimate("wall_seconds").mean == pytest.approx(61)


def test_the_markdown_has_means_intervals_and_every_seed(varied):
    plan, results = varied
    text = markdown(plan, results)
    assert "| algo.clip_high=0.2 | 40.0 ± 24.8 | - | 0.25 | 24.0 | 20.0 | 1.50 | 0.40 | 1m01s | 3/3 |" in text
    assert "| algo.clip_high=0.28 | 47.0 ± 32.6 | +7.0 ± 8.6 |" in text
    assert "| algo.clip_high=0.4 | 30.0 | -10.0 |" in text
    assert "| 1/3 |" in text
    assert "| algo.clip_high=0.28 | 2 | 10.0 | 61.0 |" in text
    assert "| algo.clip_high=0.4 | 0 | waiting | - |" in text
    assert "95% Student's t interval over seeds" in text
    assert "demo.yaml, with train.steps=4; 4 steps; seeds 0, 1, 2." in text
    assert "paper" not in text


def test_the_steps_of_arms_that_differ_in_them():
    plan = grid(DEFAULT, [], 1, ["train.steps=4,8,2"])
    assert "; 2 to 8 steps; seeds 0." in markdown(plan, [])


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("seeds", [2, 3])
def test_no_figure_is_cut_on_a_narrow_terminal(tmp_path, width, seeds):
    keys = ["algo.clip_high=0.2,0.28", "sampling.max_new_tokens=48,56"]
    plan = grid(DEFAULT, ["train.steps=4"], seeds, keys)
    results = written(tmp_path, plan, {arm.name: {s: 0.11 + 0.31 * s for s in plan.seeds} for arm in plan.arms})
    screen = io.StringIO()
    print_ablation(plan, results, Console(file=screen, width=width))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in screen.getvalue()
    heads, rows = ablation_table(results)
    for row in rows:
        assert any(row[heads.index("accuracy %")] in line for line in lines)
        assert any(row[heads.index("difference")] in line for line in lines)
    assert "algo.clip_high=0.28" in "".join("".join(line.split()) for line in lines)


def test_labels_cannot_change_the_markdown(varied):
    plan, results = varied
    hostile = replace(results[0], arm=replace(results[0].arm, label="a|b\n# <script> `x` \x1b[2J"))
    text = markdown(plan, [hostile])
    assert "a\\|b # \\<script\\> \\`x\\` \\\\x1b\\[2J" in text
    assert "\x1b" not in text


def test_the_json_has_every_number(varied):
    plan, results = varied
    report = json.loads(ablation_json(plan, results))
    assert report["seeds"] == [0, 1, 2]
    assert report["overrides"] == ["train.steps=4"]
    first, second, third = report["arms"]
    assert first["accuracy"]["mean"] == pytest.approx(0.4)
    assert second["difference"]["mean"] == pytest.approx(0.07)
    assert second["changes"] == {"algo.clip_high": 0.28}
    assert [run["state"] for run in third["runs"]] == ["waiting", "done", "waiting"]
    assert third["runs"][1]["accuracy"] == 0.3
    assert first["runs"][2]["wall_seconds"] == 62


@pytest.mark.slow
def test_rows_of_the_papers_table(tmp_path):
    plan = paper_table(DEFAULT, ["train.steps=4"], 2)
    accuracies = {arm.name: {0: 0.1 * i, 1: 0.1 * i + 0.05} for i, arm in enumerate(plan.with_own_runs())}
    results = written(tmp_path, plan, accuracies)
    heads, rows = ablation_table(results)
    assert heads[:4] == ["arm", "paper", "accuracy %", "difference"]
    assert rows[0][:4] == ["Naive GRPO", "30", "2.5 (0.0 to 5.0)", "-"]
    assert rows[5][:4] == ["+ Dynamic Sampling (DAPO)", "50", "52.5 (50.0 to 55.0)", "+10.0 (all equal)"]
    assert rows[6][:4] == ["DAPO without Overlong Filtering", "", "62.5 (60.0 to 65.0)", "+10.0 (all equal)"]
    assert rows[10][:4] == ["DAPO without Dynamic Sampling", "", "42.5 (40.0 to 45.0)", "-10.0 (all equal)"]
    text = markdown(plan, results)
    assert "in brackets, the range over seeds; an interval needs 3 or more seeds (--seeds 3)." in text
    assert "±" not in text
    assert "DAPO without Dynamic Sampling: same settings, and therefore same runs, as + Token-level Loss." in text
    in_runs = text[text.index("## Every run") : text.index("## Arms")]
    assert "| DAPO without Dynamic Sampling |" not in in_runs
    assert text.count("| DAPO without Dynamic Sampling |") == 3, "in the table, the differences and the arms"
    draw_ablation(plan, results, tmp_path / "ablation.png")
    assert (tmp_path / "ablation.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_a_picture_without_some_arms_and_with_many(tmp_path):
    plan = grid(DEFAULT, ["train.steps=4"], 1, ["algo.clip_high=" + ",".join(f"0.{n}" for n in range(20, 32))])
    accuracies = {arm.name: {0: 0.4} if i != 3 else {} for i, arm in enumerate(plan.arms)}
    results = written(tmp_path, plan, accuracies)
    draw_ablation(plan, results, tmp_path / "ablation.png")
    assert (tmp_path / "ablation.png").stat().st_size > 10_000


def test_the_picture_has_a_panel_for_each_compared_quantity(tmp_path):
    plan = grid(DEFAULT, ["train.steps=4"], 2, ["algo.clip_high=0.2,0.28"])
    plan = replace(plan, compared=("response_length", "accuracy", "truncated"))
    results = written(tmp_path, plan, {arm.name: {0: 0.4, 1: 0.5} for arm in plan.arms})
    accuracy, length, truncated, *_ = ablation_figure(plan, results).axes
    heads = [axis.get_xlabel() for axis in (accuracy, length, truncated)]
    assert heads == ["final held-out accuracy, %", "length", "cut off %"]
    assert [text.get_text() for text in accuracy.texts] == ["45.0", "45.0"]
    means = [arm.estimate("response_length").mean for arm in results]
    assert [text.get_text() for text in length.texts] == [f"{mean:.1f}" for mean in means]
    assert [label.get_text() for label in accuracy.get_yticklabels()] == [arm.label for arm in plan.arms]
    assert not any(label.get_text() for label in length.get_yticklabels())


def test_a_run_with_other_settings_is_named(tmp_path):
    plan = grid(DEFAULT, ["train.steps=4"], 1, ["algo.clip_high=0.2,0.28"])
    accuracies = {arm.name: {0: 0.4} for arm in plan.arms}
    written(tmp_path, plan, accuracies)
    other = grid(DEFAULT, ["train.steps=4", "train.lr=1e-3"], 1, ["algo.clip_high=0.2,0.28"])
    with pytest.raises(UserError, match=r"seed-0: holds a run with different settings: train\.lr 0\.0002 → 0\.001"):
        all_runs(other, tmp_path)


# What is seen


def half_way(tmp_path):
    """Two arms with two seeds: one run done, one at step 3 of 4, one failed, one waiting."""
    plan = grid(DEFAULT, ["train.steps=4"], 2, ["algo.clip_high=0.2,0.28"])
    first, second = plan.arms
    written(tmp_path, plan, {first.name: {0: 0.4}, second.name: {}})
    other = RunDirectory.create(tmp_path / second.name / "seed-0", second.config(0))
    for step in (1, 2, 3):
        other.append_metrics(step, {"eval/accuracy": 0.25 if step == 2 else None})
    with other.metrics_path.open("a") as file:
        file.write('{"step": 4, "eval/acc')  # a line that is being written
    runs = all_runs(plan, tmp_path)
    assert [(run.state, run.step, run.accuracy) for run in runs] == [
        ("done", 4, 0.4),
        ("waiting", 3, 0.25),
        ("waiting", 0, None),
        ("waiting", 0, None),
    ]
    runs[1].state = "running"
    runs[2].state, runs[2].message = "failed", "it diverged \x1b[2J"
    return plan, runs


def test_the_live_table_has_every_run(tmp_path):
    plan, runs = half_way(tmp_path)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    watcher = LiveAblationDisplay(console, plan, runs)
    console.print(watcher)
    watcher.changed(runs[2])
    text = screen.getvalue()
    lines = text.splitlines()
    assert lines[0].startswith("2 of 4 runs")
    assert next(line.split() for line in lines if line.startswith("algo.clip_high=0.2 ")) == [
        "algo.clip_high=0.2",
        "done",
        "40.0%",
        "failed",
    ]
    assert next(line.split()[1:] for line in lines if line.startswith("algo.clip_high=0.28")) == [
        "3/4",
        "25.0%",
        "waiting",
    ]
    assert "algo.clip_high=0.2, seed 1 failed: it diverged \\x1b[2J" in text


def test_lines_where_there_is_no_terminal(tmp_path):
    _, runs = half_way(tmp_path)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    watcher = PlainAblationDisplay(stream, runs)
    for run in (runs[1], runs[1], runs[2]):
        watcher.changed(run)
    watcher.note("fertig ±")
    stream.seek(0)
    assert stream.read().splitlines() == [
        "[2/4] algo.clip_high=0.28, seed 0: step 3/4, held-out accuracy 25.0%",
        "[2/4] algo.clip_high=0.2, seed 1: failed: it diverged \\x1b[2J",
        "fertig \\xb1",
    ]
