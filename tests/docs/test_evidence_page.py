"""The pages of evidence: their tables come from the saved runs, their commands from the experiments."""

import json
import shlex

import evidence
import evidence_arms
import evidence_pretrained
import evidence_vapo_table
import gradient_noise
import pytest
from support import REPOSITORY

from dapo_rl.lab.ablate.plan import arms_of, grid, paper_table
from dapo_rl.lab.ablate.techniques import TECHNIQUES
from dapo_rl.recipes import packaged_recipe, recipe_names

PAGE = (REPOSITORY / "docs" / "evidence.md").read_text()
PRETRAINED = (REPOSITORY / "docs" / "evidence-pretrained.md").read_text()
PAGES = {
    "embedded": (PAGE, evidence.EXPERIMENTS, evidence.Experiment.in_words),
    "pretrained": (PRETRAINED, evidence_pretrained.EXPERIMENTS, evidence_pretrained.in_words),
}
EACH = pytest.mark.parametrize(
    ("page", "experiment"),
    [(page, experiment) for page, experiments, _ in PAGES.values() for experiment in experiments],
    ids=lambda value: value.name if isinstance(value, evidence.Experiment) else "",
)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "experiments", "in_words"), PAGES.values(), ids=PAGES)
def test_a_table_is_that_of_the_saved_runs(page, experiments, in_words):
    start = page.index(evidence.HEAD)
    shown = page[start:].split("\n\n")[0].removeprefix(evidence.HEAD).strip().splitlines()
    assert shown == evidence.table(experiments, in_words)
    assert f"{evidence.comparisons(experiments)} comparisons" in page


@EACH
def test_an_experiment_has_its_command_its_picture_and_its_seeds(page, experiment):
    assert f"    {experiment.command}\n" in page
    assert f"](evidence-{experiment.name}.png)" in page
    assert (REPOSITORY / "docs" / f"evidence-{experiment.name}.png").read_bytes()[:4] == b"\x89PNG"
    data = evidence.read(experiment)
    assert data["command"] == experiment.command
    assert len(experiment.seeds) >= 8
    assert [sorted(run["seed"] for run in arm["runs"]) for arm in data["arms"]] == [list(experiment.seeds)] * 2


@EACH
def test_an_experiment_switches_its_technique_and_nothing_else(page, experiment):
    recipe = packaged_recipe(f"lab/{experiment.recipe or experiment.name}")
    without, with_it = grid(recipe, experiment.settings.split(), 1, [experiment.vary]).arms
    on = [[each.name for each in TECHNIQUES if each.is_on(arm.config(0))] for arm in (without, with_it)]
    assert on == [[], [experiment.technique]]
    assert set(with_it.changes) == {experiment.vary.partition("=")[0]}
    labels = [arm["label"] for arm in evidence.read(experiment)["arms"]]
    assert labels == [without.label, with_it.label]


def test_each_table_of_several_arms_is_that_of_the_saved_runs():
    shown = [part.split("\n\n")[0].strip().splitlines() for part in PAGE.split(evidence_arms.HEAD)[1:]]
    assert shown == [evidence_arms.table(group) for group in evidence_arms.GROUPS]
    for group in evidence_arms.GROUPS:
        assert f"its {evidence_arms.count(group)} comparisons" in " ".join(PAGE.split())


COMPARISONS = [comparison for group in evidence_arms.GROUPS for comparison in group]


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.name)
def test_a_comparison_has_its_command_its_picture_and_its_seeds(comparison):
    assert f"    {comparison.command}\n" in PAGE
    assert f"](evidence-{comparison.name}.png)" in PAGE
    assert (REPOSITORY / "docs" / f"evidence-{comparison.name}.png").read_bytes()[:4] == b"\x89PNG"
    data = evidence_arms.read(comparison)
    assert data["command"] == comparison.command
    seeds = [sorted(run["seed"] for run in arm["runs"]) for arm in data["arms"]]
    assert seeds == [list(comparison.seeds)] * len(comparison.labels)
    recipe, words = packaged_recipe(f"lab/{comparison.recipe or comparison.name}"), shlex.split(comparison.vary)
    options = dict.fromkeys(words[::2], words[1::2])
    plan = grid(recipe, [], 1, options["--vary"]) if "--vary" in options else arms_of(recipe, [], 1, options["--arm"])
    assert [arm["label"] for arm in data["arms"]] == [arm.label for arm in plan.arms]


def test_the_table_of_vapos_techniques_is_that_of_the_saved_runs():
    data = evidence_vapo_table.read()
    start = PAGE.index(evidence_vapo_table.HEAD)
    shown = PAGE[start:].split("\n\n")[0].removeprefix(evidence_vapo_table.HEAD).strip().splitlines()
    assert shown == evidence_vapo_table.table(data)
    assert f"    {evidence_vapo_table.COMMAND}\n" in PAGE
    assert data["command"] == evidence_vapo_table.COMMAND
    assert f"its {evidence_vapo_table.count(data)} comparisons" in " ".join(PAGE.split())
    assert f"](evidence-{evidence_vapo_table.NAME}.png)" in PAGE
    assert (REPOSITORY / "docs" / f"evidence-{evidence_vapo_table.NAME}.png").read_bytes()[:4] == b"\x89PNG"
    assert [sorted(run["seed"] for run in arm["runs"]) for arm in data["arms"]] == [data["seeds"]] * 9
    plan = paper_table(packaged_recipe("lab/presets"), [], 1, name="vapo")
    assert [arm["label"] for arm in data["arms"]] == [arm.label for arm in plan.arms]


def test_every_recipe_of_the_lab_has_its_experiment():
    own = {each.recipe or each.name for _, experiments, _ in PAGES.values() for each in experiments}
    known = {f"lab/{name}" for name in own | {each.recipe or each.name for each in COMPARISONS}}
    assert {name for name in recipe_names() if name.startswith("lab/")} == known


def test_the_tool_takes_the_named_experiments_or_all():
    assert [each.name for each in evidence.selected(["token-level-loss", "clip-higher"])] == [
        "token-level-loss",
        "clip-higher",
    ]
    assert evidence.selected([]) == list(evidence.EXPERIMENTS)
    with pytest.raises(SystemExit, match="clip-lower: not one of dynamic-sampling, "):
        evidence.selected(["clip-lower"])


def test_the_differences_by_hand():
    """Three seeds: +1, +2, +3. For two degrees of freedom t is c √(2 / (1 − c²)): 4.302653 for c = 0.95,
    and 8.860206 for 1 − 0.05 / 4, of standard errors of 1/√3."""
    experiment = evidence.EXPERIMENTS[0]
    first = [{"seed": seed, "steps_to": 1.0, "tokens_to": 5.0} for seed in (0, 1, 2)]
    second = [{"seed": seed, "steps_to": 2.0 + seed, "tokens_to": 5.0} for seed in (2, 1, 0)]
    found = evidence.differences(experiment, {"arms": [{"runs": first}, {"runs": second}]}, 4)["steps_to"]
    assert (found.mean, found.comparisons) == (2.0, 4)
    assert found.half_width == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert found.corrected_half_width == pytest.approx(0.9875 * (2 / (1 - 0.9875**2)) ** 0.5 / 3**0.5, rel=1e-6)


def test_what_is_right_so_far_by_hand():
    prompt = "3+8-4=?\n"
    assert evidence.right_so_far(prompt, "3+8=11\n11-4=7\nAns")
    assert evidence.right_so_far(prompt, "3+8=11\n11-4=9")  # the last line is not complete
    assert not evidence.right_so_far(prompt, "3+8=12\n12-4")
    assert not evidence.right_so_far(prompt, "3+8=1")
    assert not evidence.right_so_far(prompt, "3+8=11\n11-4=7\nWait\n3+")
    assert evidence.right_so_far("3-8-4=?\n", "3-8=-5\n-5-4=-9\n")


def test_the_table_of_gradients_is_that_of_the_saved_runs():
    data = json.loads((REPOSITORY / "docs" / "evidence" / "overlong-gradient.json").read_text())
    start = PAGE.index(gradient_noise.HEAD)
    shown = PAGE[start:].split("\n\n")[0].removeprefix(gradient_noise.HEAD).strip().splitlines()
    assert shown == gradient_noise.table(data)
    assert len(data["seeds"]) == 32
