"""Downloads: rows and curves as CSV and JSONL, and report.png."""

import csv
import io
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from board_runs import finish, kept, make_group, make_run
from fastapi.testclient import TestClient

from dapo_rl.board.catalogue import Catalogue
from dapo_rl.board.conversations import OF_AN_EPISODE
from dapo_rl.board.downloads import AT_ONCE, COLUMNS, csv_text, file_name, safe_cell
from dapo_rl.board.launcher import Launcher
from dapo_rl.board.routes import create_app

FORMULA = '=HYPERLINK("http://evil.example","x")'


@pytest.fixture
def client(tmp_path):
    run = make_run(tmp_path / "runs" / "a", text=FORMULA)
    finish(run, {"trained": 18, "total": 36})
    make_run(tmp_path / "runs" / "-b")
    (tmp_path / "outside.png").write_bytes(b"secret")
    root = tmp_path / "runs"
    return TestClient(create_app(Catalogue([root]), Launcher(root), "token"), base_url="http://127.0.0.1")


def read_csv(answer):
    return list(csv.DictReader(io.StringIO(answer.text, newline="")))


def test_rows_as_csv(client):
    answer = client.get("/api/rows.csv?run=a&step=2")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.headers["content-disposition"] == 'attachment; filename="a-step-2-samples.csv"'
    rows = read_csv(answer)
    assert list(rows[0]) == list(COLUMNS)
    assert rows[1] == {
        **{"step": "2", "draw": "20", "sample": "1", "prompt_id": "p20", "data_source": "sums", "fate": "kept"},
        **{"status": "wrong", "correct": "False", "score": "-1.0", "reward": "-1.25", "length_penalty": "-0.25"},
        **{"advantage": "-1.0", "length": "3", "finish_reason": "stop", "version_first": "0", "version_last": "0"},
        **{"answer": "3", "truth": "2", "prompt": "1+1=?", "response": "no idea"},
        **dict.fromkeys(("messages", *OF_AN_EPISODE), ""),
    }
    assert rows[0]["response"] == f"'{FORMULA}"
    assert [row["reward"] for row in rows] == ["0.75", "-1.25", "", ""]


def test_rows_as_jsonl_keep_their_text(client):
    answer = client.get("/api/rows.jsonl?run=a&step=2")
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    rows = [json.loads(line) for line in answer.text.splitlines()]
    assert [(row["draw"], row["sample"]) for row in rows] == [(20, 0), (20, 1), (21, 0), (21, 1)]
    assert rows[0]["response"] == FORMULA
    assert rows[3]["reward"] is None
    assert set(rows[0]) == set(COLUMNS)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_rows_honour_the_filters_and_the_order(client, kind):
    answer = client.get(
        f"/api/rows.{kind}?run=a&step=2&verdict=correct&sort=reward&fate=kept&fate=all_correct&down=true"
    )
    rows = read_csv(answer) if kind == "csv" else [json.loads(line) for line in answer.text.splitlines()]
    assert [(int(row["draw"]), int(row["sample"])) for row in rows] == [(21, 0), (21, 1), (20, 0)]
    assert client.get(f"/api/rows.{kind}?run=a&step=2&q=nowhere").text.count("\n") == (kind == "csv")


def test_other_columns_follow(client, tmp_path):
    path = next((tmp_path / "runs" / "a" / "rollouts").glob("*2.parquet"))
    table = pq.read_table(path).append_column("reward/=f", pa.array([0.5, None, 1.0, 2.0]))
    parts = pa.array([[("x", 1.0)], [], None, [("y", 2.0)]], pa.map_(pa.string(), pa.float64()))
    pq.write_table(table.append_column("parts", parts).append_column("note", pa.array(["@a", "b", None, ""])), path)
    rows = read_csv(client.get("/api/rows.csv?run=a&step=2"))
    assert list(rows[0])[len(COLUMNS) :] == ["reward/=f", "parts.x", "note", "parts.y"]
    assert [list(row.values())[len(COLUMNS) :] for row in rows] == [
        ["0.5", "1.0", "'@a", ""],
        ["", "", "b", ""],
        ["1.0", "", "", ""],
        ["2.0", "", "", "2.0"],
    ]
    lines = client.get("/api/rows.jsonl?run=a&step=2").text.splitlines()
    assert json.loads(lines[0])["extra"] == {"reward/=f": 0.5, "parts.x": 1.0, "note": "@a"}


def test_more_rows_than_are_in_memory_as_text(client, tmp_path):
    run = make_run(tmp_path / "runs" / "many", steps=1)
    run.write_rollouts(1, [kept(make_group(n, [("2", True), ("3", False)])) for n in range(AT_ONCE)], 0)
    rows = read_csv(client.get("/api/rows.csv?run=many&step=1&sort=draw&down=true"))
    assert [(int(row["draw"]), int(row["sample"])) for row in rows] == [
        (n, sample) for n in reversed(range(AT_ONCE)) for sample in (0, 1)
    ]


def test_what_is_not_there(client, tmp_path):
    assert client.get("/api/rows.csv?run=a&step=99").json() == {"error": "No groups were written at step 99."}
    assert client.get("/api/rows.csv?run=a&step=99").status_code == 404
    assert client.get("/api/rows.exe?run=a&step=1").status_code == 404
    assert client.get("/api/rows.csv?run=../outside&step=1").status_code == 404
    next((tmp_path / "runs" / "a" / "rollouts").glob("*1.parquet")).write_bytes(b"no table")
    answer = client.get("/api/rows.csv?run=a&step=1")
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("step-000001.parquet: not a table of rollouts")


def test_a_curve_with_every_point(client):
    answer = client.get("/api/curves.csv?run=a&run=-b&metric=acc/mean&share=0")
    assert answer.headers["content-disposition"] == 'attachment; filename="acc-mean.csv"'
    assert answer.text.splitlines() == [
        "run,metric,step,value,smoothed",
        *("a,acc/mean,1,0.1,0.1", "a,acc/mean,2,0.2,0.2", "a,acc/mean,3,0.3,0.3"),
        *("'-b,acc/mean,1,0.1,0.1", "'-b,acc/mean,2,0.2,0.2", "'-b,acc/mean,3,0.3,0.3"),
    ]
    zoomed = client.get("/api/curves.csv?run=a&metric=acc/mean&first=2&last=2&share=0").text.splitlines()
    assert zoomed[1:] == ["a,acc/mean,2,0.2,0.2"]
    start = client.get("/api/curves.csv?run=a&metric=eval/accuracy&share=0").text.splitlines()
    assert start[1:] == ["a,eval/accuracy,0,0.25,0.25", "a,eval/accuracy,2,0.5,0.5"]
    # An average over half of three steps: weights 1, 1/5 and 1/25, for 2 / (1.5 + 1) = 4/5.
    smooth = read_csv(client.get("/api/curves.csv?run=a&metric=acc/mean&share=0.5"))
    assert [float(row["smoothed"]) for row in smooth] == pytest.approx(
        [0.1, (0.2 + 0.1 / 5) / 1.2, (0.3 + 0.2 / 5 + 0.1 / 25) / 1.24]
    )


@pytest.mark.parametrize(
    ("logged", "first", "steps"),
    [
        ({1: 0.375, 2: 0.5}, 0, [0, 1, 2]),
        ({1: 0.375, 2: 0.5}, 1, [1, 2]),
        ({}, 0, [0]),
        ({0: 0.125, 1: 0.375}, 0, [0, 1]),
    ],
)
def test_a_curve_begins_with_the_evaluation_before_the_first_step(tmp_path, logged, first, steps):
    """The summary has it; the log of a newer version has it too, and comes first."""
    run = make_run(tmp_path / "a", steps=1)
    run.metrics_path.write_text("")
    finish(run, {"trained": 18, "total": 36})
    for step, accuracy in logged.items():
        run.append_metrics(step, {"eval/accuracy": accuracy})
    client = TestClient(create_app(Catalogue([tmp_path]), Launcher(tmp_path), "token"), base_url="http://127.0.0.1")
    rows = read_csv(client.get(f"/api/curves.csv?run=a&metric=eval/accuracy&share=0&first={first}"))
    known = {0: 0.25} | logged
    assert [(int(row["step"]), float(row["value"])) for row in rows] == [(step, known[step]) for step in steps]


def test_the_report(client, tmp_path):
    report = tmp_path / "runs" / "a" / "report.png"
    assert client.get("/api/reports?run=a&run=-b").json() == {"runs": []}
    assert client.get("/api/report.png?run=a").status_code == 404
    report.write_bytes(b"\x89PNG as it is")
    assert client.get("/api/reports?run=a&run=-b").json() == {"runs": ["a"]}
    answer = client.get("/api/report.png?run=a")
    assert (answer.content, answer.headers["content-type"]) == (b"\x89PNG as it is", "image/png")
    assert answer.headers["content-disposition"] == 'attachment; filename="a-report.png"'
    report.unlink()
    os.symlink(tmp_path / "outside.png", report)
    assert client.get("/api/report.png?run=a").status_code == 404


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "  =1"])
def test_what_a_spreadsheet_would_evaluate(text):
    assert safe_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["1+1", "a=b", "", "x-y", "'=1", -1.5, 0, None, True])
def test_other_cells_stay(value):
    assert safe_cell(value) is value


def test_csv_is_quoted():
    text = "".join(csv_text(("a", "=b"), [('x,"y"\n', 1), ("é", None)]))
    assert text == 'a,\'=b\r\n"x,""y""\n",1\r\né,\r\n'


def test_names_of_files():
    assert file_name('../é"x/y\r\n.csv') == "x-y-.csv"
    assert file_name("///") == "download"
    assert len(file_name("x" * 1000 + ".csv")) == 150
