"""Data files whose lines have no end."""

from dapo_rl.data import files, load_rows


def test_a_line_that_is_too_long_is_skipped_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE", 100)
    path = tmp_path / "rows.jsonl"
    good = '{"prompt": "1+1=?", "answer": "2"}\n'
    path.write_text(good + '{"prompt": "' + "x" * 1000 + '"}\n' + good + '{"prompt": "' + "y" * 83 + '"}\n' + "z" * 400)
    rows = load_rows(path)
    assert [row.number for row in rows.good] == [1, 3, 4]
    assert [str(row) for row in rows.bad] == [
        f"rows.jsonl:{number}: a line of more than 0 MiB; a line holds one object" for number in (2, 5)
    ]


def test_a_line_of_just_the_length_is_read_whole(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    line = '{"prompt": "1+1=?", "answer": "2"}'
    for limit in range(len(line) - 2, len(line) + 4):
        monkeypatch.setattr(files, "LONGEST_LINE", limit)
        path.write_text(f"{line}\n{line}\n{line}")
        rows = load_rows(path)
        fits = [len(line) + 1 <= limit, len(line) + 1 <= limit, len(line) <= limit]
        assert [row.number for row in rows.good] == [n for n, fit in enumerate(fits, 1) if fit], limit
        assert len(rows.good) + len(rows.bad) == 3
