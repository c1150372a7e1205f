"""The source `tasks`, for environments that make their tasks themselves."""

import pytest

from dapo_rl.config import DataSettings, SourceSettings
from dapo_rl.data import build_prompts, load_rows
from dapo_rl.data.tasks import is_task
from dapo_rl.errors import UserError
from dapo_rl.models.load import load_tokenizer


def test_tasks_are_numbered_and_short():
    tokenizer = load_tokenizer("tiny")
    train = build_prompts(load_rows("tasks"), tokenizer, DataSettings(chat_template="never"))
    held_out = build_prompts(
        load_rows(SourceSettings(source="tasks", split="heldout", size=300)), tokenizer, DataSettings()
    )
    assert (len(train.prompts), len(held_out.prompts)) == (1000, 300)
    assert all(is_task(prompt) for prompt in (*train.prompts, *held_out.prompts))
    assert max(len(prompt.token_ids) for prompt in (*train.prompts, *held_out.prompts)) < 8
    assert not {p.token_ids.tobytes() for p in train.prompts} & {p.token_ids.tobytes() for p in held_out.prompts}


@pytest.mark.parametrize(
    ("parameters", "line"),
    [({"size": 0}, "size: expected a whole number"), ({"split": "test"}, "split: 'test'"), ({"sizes": 1}, "no such")],
)
def test_wrong_parameters_are_one_line(parameters, line):
    with pytest.raises(UserError, match=line):
        load_rows(SourceSettings(source="tasks", **parameters))
