"""What a teacher reads in place of its pupil's prompts: the template, read as the prompts were."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import make_prompt, make_sample

from dapo_rl import Config
from dapo_rl.config import DataSettings
from dapo_rl.data.prompts import build_prompts
from dapo_rl.data.rows import Row, Rows
from dapo_rl.errors import UserError
from dapo_rl.models.tokenizer import build_tokenizer
from dapo_rl.train.batch import make_batch
from dapo_rl.train.teacher import Teacher
from dapo_rl.train.teacher_prompts import TeacherPrompts
from dapo_rl.types import Group, Verdict

TEMPLATE = "{prompt}\nIt is {answer}. {this} stays."
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"


def tokenizer(chat=True):
    words = build_tokenizer()
    words.chat_template = CHAT if chat else None
    return words


def prompts_of(rows, words, settings):
    built = build_prompts(Rows("data.train", "s", [Row(str(i), i, r) for i, r in enumerate(rows)], []), words, settings)
    return built.prompts


def read(rows, template=TEMPLATE, chat=True, **settings):
    words, data = tokenizer(chat), DataSettings(**settings)
    prompts = prompts_of(rows, words, data)
    return [text_of(words, ids) for ids in TeacherPrompts(template, words, data).tokens(prompts)]


def text_of(words, ids):
    return words.decode(ids).removeprefix(words.bos_token)  # of plain prompts


PLAIN = {"prompt": "1+1=?", "answer": "2"}
MESSAGES = {"prompt": [{"role": "system", "content": "Sums."}, {"role": "user", "content": "1+1=?"}], "answer": "2"}
FILLED = "1+1=?\nIt is 2. {this} stays."


def test_a_plain_prompt_stays_plain():
    assert read([PLAIN]) == [FILLED]
    assert read([PLAIN], chat=False, system_prompt="Add.") == ["Add.\n\n" + FILLED]


def test_a_prompt_in_chat_form_keeps_its_other_messages():
    assert read([PLAIN], chat_template="always") == [f"<user>{FILLED}<a>"]
    assert read([PLAIN], system_prompt="Add.") == [f"<system>Add.<user>{FILLED}<a>"]
    assert read([MESSAGES]) == [f"<system>Sums.<user>{FILLED}<a>"]
    several = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}, *MESSAGES["prompt"][1:]]
    assert read([MESSAGES | {"prompt": several}]) == [f"<user>Hi<assistant>Yes<user>{FILLED}<a>"]
    assert read([MESSAGES], chat_template="never") == ["Sums.\n\n" + FILLED]
    begun = {"prompt": [*MESSAGES["prompt"], {"role": "assistant", "content": "So"}], "answer": "2"}
    assert read([begun], chat_template="never") == [f"Sums.\n\n{FILLED}\n\nSo"]


def test_prompts_of_both_forms_keep_their_order():
    other = {"prompt": "2+2=?", "answer": "4"}
    assert read([PLAIN, MESSAGES, other]) == [
        FILLED,
        f"<system>Sums.<user>{FILLED}<a>",
        "2+2=?\nIt is 4. {this} stays.",
    ]


@given(st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=12))
def test_braces_in_an_answer_are_text(answer):
    assert read([PLAIN | {"answer": answer}], "{prompt} {answer}", chat=False) == [f"1+1=? {answer}"]


def test_the_template_that_is_the_prompt_gives_the_prompt():
    for row, settings in ((PLAIN, {}), (MESSAGES, {}), (PLAIN, {"chat_template": "always", "system_prompt": "S"})):
        words, data = tokenizer(), DataSettings(**settings)
        (prompt,) = prompts_of([row], words, data)
        (ids,) = TeacherPrompts("{prompt}", words, data).tokens([prompt])
        assert ids.tolist() == prompt.token_ids.tolist()


def test_mistakes_are_one_line():
    with pytest.raises(
        UserError, match=r"^teacher\.prompt: prompt 1 has no answer; data\.answer_key names its column$"
    ):
        read([PLAIN, {"prompt": "2+2=?"}])
    assert read([{"prompt": "2+2=?"}], "Think. {prompt}") == ["Think. 2+2=?"]
    for template, said in (
        ("It is {answer}.", "it has no {prompt}: the teacher would not see the question"),
        ("{prompt} {anwser}", "{anwser} is not replaced; did you mean {answer}?"),
    ):
        with pytest.raises(UserError) as caught:
            Config.build({"teacher.prompt": template})
        assert str(caught.value) == f"teacher.prompt: {said}"
    for settings, said in (
        ({"env.tools": ["calculator"]}, r"^teacher\.prompt: environments render their own prompts"),
        ({"algo.advantage": "gae"}, r"^teacher\.prompt: a critic's advantages"),
    ):
        with pytest.raises(UserError, match=said):
            Config.build({"teacher.prompt": TEMPLATE, **settings})


def test_the_teacher_reads_its_own_prompt_and_the_pupil_keeps_its_own():
    """Groups of different prompts, and a sample that is not trained on, which is not scored."""
    words = tokenizer(chat=False)
    config = Config.build({"sampling.group_size": 2, "overlong.mask_truncated": True})
    verdicts = (Verdict(1.0, True, "correct"), Verdict(-1.0, False, "wrong"))
    cut = make_sample(4).replace(finish_reason="length")
    groups = [
        Group(0, make_prompt("p", "1+1=?", "2"), (make_sample(3), cut), verdicts),
        Group(1, make_prompt("q", "2+2=?", "4"), (make_sample(2), make_sample(5)), verdicts),
    ]
    seen = []

    def score(samples):
        seen.extend((text_of(words, s.prompt_ids), len(s.token_ids)) for s in samples)
        return [np.full(len(s.token_ids), -len(s.prompt_ids), np.float32) for s in samples]

    before = make_batch(groups, config, step=1)
    after = Teacher(TeacherPrompts("{prompt} It is {answer}.", words, config.data)).scored(before, score)
    assert seen == [("1+1=? It is 2.", 3), ("2+2=? It is 4.", 2), ("2+2=? It is 4.", 5)]
    for old, new in zip(before.samples, after.samples, strict=True):
        assert new.prompt_ids.tolist() == old.prompt_ids.tolist()
    assert "teacher_logps" not in after.samples[1].columns
    assert [s["teacher_logps"][0] for s in after.trained] == [-len(words(text).input_ids) for text, _ in seen]
