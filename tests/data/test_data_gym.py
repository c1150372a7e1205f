import pytest

from dapo_rl.config import SourceSettings
from dapo_rl.data import load_rows
from dapo_rl.errors import UserError

reasoning_gym = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")


def gym(name, **parameters):
    return load_rows(SourceSettings(source=f"reasoning_gym:{name}", **parameters))


def score(columns, answer):
    """As a verifier does it, which has the columns and nothing else."""
    name = columns["data_source"].removeprefix("reasoning_gym:")
    entry = {part: columns[part] for part in ("question", "answer", "metadata")}
    return reasoning_gym.create_dataset(name, **columns["gym_parameters"]).score_answer(answer, entry)


def test_rows_are_the_entries_of_the_task():
    rows = gym("leg_counting", size=3, seed=1, max_animals=4)
    entries = reasoning_gym.create_dataset("leg_counting", size=3, seed=1, max_animals=4)
    assert [r.where for r in rows.good] == [f"reasoning_gym:leg_counting:row {n}" for n in range(3)]
    for row, entry in zip(rows.good, entries, strict=True):
        assert row.columns == {
            "prompt": entry["question"],
            "data_source": "reasoning_gym:leg_counting",
            "gym_parameters": {"max_animals": 4},
            **entry,
        }
    assert len(load_rows("reasoning_gym:leg_counting").good) == 1000
    assert [r.columns for r in gym("leg_counting", size=3).good] == [
        r.columns for r in gym("leg_counting", size=3, seed=0).good
    ]


# Scorers of these read tuples (rearc), keys that are numbers (graph_color), or NumPy's strings (knights_knaves).
@pytest.mark.parametrize("name", ["leg_counting", "rearc", "knights_knaves", "countdown", "palindrome_partitioning"])
def test_the_columns_are_enough_for_the_scorer(name):
    for row in gym(name, size=2).good:
        assert score(row.columns, row.columns["answer"]) == 1.0
        assert score(row.columns, "no idea") < 0.5


def test_metadata_keeps_its_types():
    (row,) = gym("graph_color", size=1).good
    entry = reasoning_gym.create_dataset("graph_color", size=1, seed=0)[0]
    assert row.columns["metadata"] == entry["metadata"]
    assert row.columns["answer"] is None


def test_the_scorer_gets_the_parameters_of_the_task():
    # This scorer allows an error of one unit in the last place of its parameters: 0.1 here, 0.001 by default.
    (row,) = gym("decimal_arithmetic", size=1, min_num_decimal_places=1, max_num_decimal_places=1).good
    close = str(float(row.columns["answer"]) + 0.09)
    assert score(row.columns, close) == 1.0
    assert score({**row.columns, "gym_parameters": {}}, close) == 0.0


def test_a_mixture_is_scored_by_its_parts():
    parts = [{"name": "leg_counting", "config": {"max_animals": 4}}, {"name": "basic_arithmetic", "weight": 2}]
    rows = gym("composite", size=20, datasets=parts).good
    assert {r.columns["data_source"] for r in rows} == {"reasoning_gym:leg_counting", "reasoning_gym:basic_arithmetic"}
    for row in rows:
        expected = {"max_animals": 4} if "leg" in row.columns["data_source"] else {}
        assert row.columns["gym_parameters"] == expected
        assert score(row.columns, row.columns["answer"]) == 1.0


def test_a_part_of_a_mixture_without_a_weight_has_the_weight_1():
    parts = [{"name": "leg_counting"}, {"name": "basic_arithmetic", "weight": 4}]
    sources = [row.columns["data_source"] for row in gym("composite", size=200, datasets=parts).good]
    assert sources.count("reasoning_gym:leg_counting") / len(sources) == pytest.approx(1 / 5, abs=0.1)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("leg_countin", {}, r"data\.train: reasoning_gym has no task 'leg_countin'; did you mean .*:leg_counting\?"),
        ("", {}, r"reasoning_gym has no task ''"),
        ("leg_counting", {"max_animal": 4}, r"data\.train\.max_animal: .* did you mean max_animals\?"),
        ("leg_counting", {"zzz": 4}, r"data\.train\.zzz: .*no such parameter; it has .*max_animals"),
        ("leg_counting", {"size": -3}, r"data\.train\.size: expected a whole number of at least 1, got -3"),
        ("chain_sum", {"max_terms": 3.5}, r"data\.train\.max_terms: expected a whole number, got 3\.5"),
        ("leg_counting", {"seed": "x"}, r"data\.train\.seed: expected a whole number, got 'x'"),
        ("leg_counting", {"min_animals": 9, "max_animals": 2}, r"leg_counting rejects its parameters: .*max_animals"),
        ("composite", {}, r"composite rejects its parameters: Must specify at least one dataset"),
        ("composite", {"datasets": [{"nam": "leg_counting"}]}, r"composite rejects its parameters: .*nam"),
    ],
)
def test_mistakes_are_one_line(name, parameters, message):
    with pytest.raises(UserError, match=message) as caught:
        gym(name, **parameters)
    assert "\n" not in str(caught.value)


def test_an_entry_that_cannot_be_generated_is_a_bad_row(monkeypatch):
    from reasoning_gym.factory import DATASETS

    task = DATASETS["leg_counting"][0]
    real = task.__getitem__

    def sometimes(self, index):
        if index == 1:
            raise RuntimeError("no puzzle\nfound")
        return real(self, index)

    monkeypatch.setattr(task, "__getitem__", sometimes)
    rows = gym("leg_counting", size=3)
    assert [r.number for r in rows.good] == [0, 2]
    assert [str(b) for b in rows.bad] == [
        "reasoning_gym:leg_counting:row 1: the task could not generate it: no puzzle found"
    ]
