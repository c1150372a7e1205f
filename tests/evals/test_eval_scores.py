"""`dapo eval --scores`: what is written can be trained on as it is."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support import tokenizer

from dapo_rl.config import DataSettings
from dapo_rl.data import build_prompts, load_rows
from dapo_rl.errors import UserError
from dapo_rl.evals.protocols import make_plan
from dapo_rl.evals.run import evaluate_models
from dapo_rl.evals.scores import check_scores, write_scores

ROWS = [
    {"prompt": "1+1=?", "answer": "2", "extra_info": {"index": 0}},
    {"prompt": "1+2=?", "answer": "3", "pass_rate": 0.9},
    {"prompt": "1+3=?", "answer": "4"},
    {"prompt": "1+4=?", "answer": "5"},
]


class Responses:
    """Row 0: 1 of 4 right; row 1: 1 of 2, as the verifier failed twice; row 3: never judged; row 2 not sampled."""

    def read(self, columns):
        judged = {"0": "rwww", "1": "rwxx", "3": "xxxx"}
        for name, samples in judged.items():
            for sample in samples:
                status = {"r": "correct", "w": "wrong", "x": "timeout"}[sample]
                yield {"prompt_id": name, "correct": sample == "r", "status": status}


def read(path):
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_keep_their_columns_and_get_pass_rates(tmp_path, suffix):
    path = tmp_path / f"scored{suffix}"
    path.write_text("old")
    assert write_scores(path, load_rows(ROWS), Responses()) == 3
    written = read(path)
    assert [row["prompt"] for row in written] == ["1+1=?", "1+2=?", "1+4=?"]
    assert [row["answer"] for row in written] == ["2", "3", "5"]
    assert [row["pass_rate"] for row in written] == [0.25, 0.5, None]
    assert [row["pass_rate_samples"] for row in written] == [4, 2, 0]
    assert written[0]["extra_info"] == {"index": 0}
    assert [path.name for path in tmp_path.iterdir()] == [path.name]
    found = build_prompts(load_rows(path), tokenizer(), DataSettings(pass_rate=(0.3, 1)), True)
    assert [prompt.text for prompt in found.prompts] == ["1+2=?"]


@pytest.mark.parametrize(
    ("suffix", "column"), [(".jsonl", b"bytes"), (".parquet", {}), (".parquet", [1, "a"]), (".parquet", 2**70)]
)
def test_a_column_that_the_format_cannot_hold(tmp_path, suffix, column):
    path = tmp_path / f"scored{suffix}"
    with pytest.raises(UserError, match=r"--scores: .*; name a \.(jsonl|parquet) file"):
        write_scores(path, load_rows([ROWS[0] | {"odd": column}]), Responses())
    assert not list(tmp_path.iterdir())


def test_no_file_of_the_data_is_written_over(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    data = tmp_path / "b.jsonl"
    data.write_text('{"prompt": "1"}')
    for given in (f"[{tmp_path}/a.jsonl, {data}]", "~/b.jsonl"):
        plan = make_plan(given)
        with pytest.raises(UserError, match="the data itself"):
            evaluate_models(plan, ["tiny"], tmp_path / "out", scores=data)
    assert data.read_text() == '{"prompt": "1"}'


def test_mistakes_are_found_before_anything_is_sampled(tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text("{}")
    for path, models, why in (
        (tmp_path / "scored.csv", ["tiny"], "unsupported format"),
        (tmp_path / "scored.jsonl", ["tiny", "other"], "name one model"),
        (tmp_path / "no" / "scored.jsonl", ["tiny"], "there is no directory"),
        (data, ["tiny"], "the data itself"),
    ):
        with pytest.raises(UserError, match=f"--scores: .*{why}"):
            check_scores(Path(path), models, str(data))


@pytest.mark.slow
def test_the_scores_of_a_model_are_its_avg(tmp_path):
    plan = make_plan("arithmetic", {"--k": 4, "--prompts": 5, "--max-new-tokens": 40})
    path = tmp_path / "scored.jsonl"
    report, _ = evaluate_models(plan, ["tiny"], tmp_path / "out", scores=path)
    rates = [row["pass_rate"] for row in read(path)]
    assert len(rates) == 5
    assert sum(rates) / 5 == pytest.approx(report["models"][0]["metrics"]["avg@4"]["value"])
