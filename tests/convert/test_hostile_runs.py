"""Arbitrary settings and scripts: a recipe that loads and a row for every key, or one line, within seconds."""

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.config.peers import LIBRARIES
from dapo_rl.convert.hydra import UnknownValue
from dapo_rl.convert.read_run import ExternalRun, read_script
from dapo_rl.convert.shell.commands import read_shell
from dapo_rl.convert.write_recipe import convert_run, recipe_text
from dapo_rl.errors import UserError

START = {
    "verl": {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8},
    "trl": {"num_generations": 8},
    "ms-swift": {"num_generations": 8, "per_device_train_batch_size": 8},
    "areal": {"gconfig.n_samples": 4, "train_dataset.batch_size": 16},
}
VALUES = [
    *(None, True, False, 0, 1, -1, 3, 64, 2**62, 0.5, -0.5, 1e-9, 1e300, float("inf"), float("nan")),
    *("x", "", "none", "group", "dapo", "a.b", "vllm", [], [1], ["a", "b"], {}, UnknownValue("$x", "why")),
]


def outcome(call):
    """What a call returns, or the line of its error."""
    try:
        return call()
    except UserError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_any_value_of_any_setting_gives_a_recipe_or_one_line(library):
    chosen = random.Random(library)
    names = [key.replace("*", "z") for key in LIBRARIES[library].settings]
    converted = 0
    for _ in range(300):
        keys = START[library] | {key: chosen.choice(VALUES) for key in chosen.sample(names, 2)}
        result = outcome(
            lambda keys=keys: convert_run(ExternalRun(library, "s", keys), prompts=chosen.choice([None, 100]))
        )
        if isinstance(result, str):
            assert "\n" not in result
            continue
        converted += 1
        assert set(keys) <= {row.key for row in result.rows}
        assert recipe_text(result).startswith("# Converted from s")
    assert converted > 100


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab=\"'$(){}[]@`\\\n ;|&<>#-+*/:,%~!0", max_size=60))
def test_any_script_is_read_or_refused(text):
    result = outcome(lambda: read_script(f"{text}\ntrl grpo --beta 0\n", "s"))
    assert not isinstance(result, str) or "\n" not in result


PIECES = [
    *("if ", "then ", "elif ", "else ", "fi", "case $x in ", "esac", ";;", "a) ", "*) ", "[[ ", " ]]", "[ ", " ]"),
    *("((", "))", "f() ", "function f ", "{ ", "}", "for x in ", "while ", "do ", "done", "&& ", "|| ", "A+=("),
    *(")", "(", "\n", ";", '"', "'", "$x", "${A[@]}", "! ", "x=1 ", "-n ", "= ", "\\\n", "# ", "<<E", "`", "$(", "${"),
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_any_order_of_keywords_is_read_or_refused(text):
    result = outcome(lambda: read_script(f"{text}\ntrl grpo --beta 0\n", "s"))
    assert not isinstance(result, str) or "\n" not in result


@pytest.mark.parametrize(
    "script",
    [
        'a=x\n' + 'a="$a$a"\n' * 40,
        'A=(x y)\n' + 'A+=("${A[@]}")\n' * 40,
        "a=" + "x" * 60_000 + "\n" + "".join(f'b{i}="$a"\n' for i in range(60_000)),
        "a=" + "x" * 60_000 + "\necho " + '"$a" ' * 100_000,
        "A=(" + "x " * 15_000 + ")\necho " + "${A[@]}" * 1000,
    ],
    ids=["doubled", "doubled array", "many variables", "many words", "one word"],
)  # fmt: skip
def test_what_grows_without_end_is_refused_in_time(script):
    begun = time.process_time()
    with pytest.raises(UserError, match=r"expands to more than|longer than"):
        read_shell(script, {})
    assert time.process_time() - begun < 10


def test_a_long_script_is_read_in_time():
    begun = time.process_time()
    script = "".join(f"v{i}='a b'\necho \"$v{i}\"\n" for i in range(30_000))
    with pytest.raises(UserError, match="more than 20000 words"):
        read_shell(script, {})
    assert len(read_shell("".join(f"v{i}=1\nx\n" for i in range(15_000)), {})) == 15_000
    assert time.process_time() - begun < 10


@pytest.mark.slow
def test_deeply_nested_blocks_are_read():
    script = "if x; then\n" * 15_000 + "A+=(a)\n" * 1000 + "fi\n" * 15_000
    assert len(read_shell(script, {})) == 15_000
    assert read_shell("case a in b) " * 15_000, {}) == []


@pytest.mark.parametrize("line_break", ["\u2028", "\u2029", "\x85"])
def test_no_text_of_a_script_leaves_the_comments_of_its_recipe(converted, line_break):
    """YAML has more line breaks than Python's textwrap."""
    evil = f"x{line_break}env: {{mcp: [touch evil]}}{line_break}#"
    command = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_files=a.parquet "
    _, config, rows = converted(f"{command} actor_rollout_ref.rollout.n=8 trainer.total_training_steps=5 '{evil}'\n")
    assert evil in rows
    assert config.env.mcp == ()


def test_no_key_of_a_file_becomes_several(converted):
    name = "a: 1\nenv: {mcp: [touch evil]}\n#"
    keys = {"num_generations": 8, "per_device_train_batch_size": 8, "max_steps": 5, "chat_template_kwargs": {name: 1}}
    _, config, _ = converted(json.dumps(keys), "run.json")
    assert (config.env.mcp, config.data.chat_template_kwargs) == ((), {name: 1})
