"""The bookkeeping of a step: what is counted adds up, and no Python object is made for a token."""

import gc
import json

import pyarrow.parquet as pq
import pytest
from support import dapo

from dapo_rl.lab.bench import bookkeeping
from dapo_rl.lab.bench.bookkeeping import measure_bookkeeping

STAGES = {"engine (stand-in)", "sampler", "batch", "update (stand-in)", "metrics", "rollout log", "checkpoint state"}


def test_every_stage_runs_on_every_token(monkeypatch):
    tables = []
    plain = bookkeeping.write_table
    monkeypatch.setattr(
        bookkeeping, "write_table", lambda path, *rest: plain(path, *rest) or tables.append(pq.read_table(path))
    )
    result = measure_bookkeeping(6, 4, 50)
    assert set(result["parts"]) == STAGES
    assert result["seconds"] == pytest.approx(sum(result["parts"].values()))
    assert result["tokens_trained"] == 6 * 4 * 50
    assert result["tokens_in_flight"] % 25 == 0
    (table,) = tables
    assert table.num_rows == 24
    for name in ("token_ids", "logps", "train_logps", "entropies", "clipped"):
        assert [len(row) for row in table.column(name).to_pylist()] == [50] * 24


def test_objects_do_not_grow_with_tokens(monkeypatch):
    """With one object a token the second would hold 76,000 more than the first."""
    measure_bookkeeping(8, 4, 100)  # what is made once
    garbage = [[] for _ in range(50_000)]
    for each in garbage:
        each.append(each)
    gc.collect()  # what survives it is collected seldom
    del garbage, each
    plain = bookkeeping.make_batch  # here, in the middle of a measurement
    monkeypatch.setattr(bookkeeping, "make_batch", lambda *words, **named: (gc.collect(), plain(*words, **named))[1])
    short, long = (measure_bookkeeping(8, 4, tokens)["objects"] for tokens in (100, 2500))
    assert abs(long - short) < 1000


def test_a_table_of_several_row_groups_is_the_same_table(monkeypatch, tmp_path):
    from dapo_rl.runs import rollouts

    def written():
        tables = []
        plain = bookkeeping.write_table
        with monkeypatch.context() as patch:
            patch.setattr(
                bookkeeping, "write_table", lambda path, *rest: plain(path, *rest) or tables.append(pq.read_table(path))
            )
            measure_bookkeeping(6, 4, 50)
        return tables[0]

    whole = written()
    monkeypatch.setattr(rollouts, "ROW_GROUP_TOKENS", 300)
    assert written().equals(whole)


def test_the_command(tmp_path):
    done = dapo("bench", "bookkeeping", "--prompts", "4", "--group", "2", "--tokens", "30", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens_trained"] == 240
    done = dapo("bench", "bookkeeping", "--prompts", "4", "--group", "2", "--tokens", "30", cwd=tmp_path)
    assert "bookkeeping: 8 samples of 30 tokens" in done.stdout
    assert "rollout log" in done.stdout
