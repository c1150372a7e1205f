"""Reading scripts and files without running them: expansion, interpolation, and hostile input in one line."""

import pytest

from dapo_rl.convert.hydra import UnknownValue, interpolated, typed
from dapo_rl.convert.read_run import MOST_BYTES_READ, read_run, read_script
from dapo_rl.convert.shell.arithmetic import ArithmeticTextError, evaluate_arithmetic
from dapo_rl.convert.shell.commands import read_shell
from dapo_rl.errors import UserError


def words(script, number=-1):
    return [word.text for word in read_shell(script, {"HOME": "/home/me"})[number].words]


def unknown(script):
    return [word.unknown for word in read_shell(script, {})[-1].words if word.unknown]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("x=3\necho $x ${x}4 '$x' \"$x y\" \\$x", ["echo", "3", "34", "$x", "3 y", "$x"]),
        ("echo ${x:-a} ${x-b} ${HOME:+c} ${x:-${y:-d}}", ["echo", "a", "b", "c", "d"]),
        ('x=\necho "${x-a}" "${x:-b}" ${x+c} ${x:+d} "${x=e}" "${x:=f}" $x', ["echo", "", "b", "c", "", "f", "f"]),
        ("A=()\necho ${A-a} ${A+b} ${A:-c}", ["echo", "a", "c"]),
        ('d=${D:-"${HOME}/v"}\necho "$d"', ["echo", "/home/me/v"]),
        ("echo ${x:=5} $x", ["echo", "5", "5"]),
        ("n=4\necho $((1024 * n)) $(((n + 1) * 2)) $(( $n ** 2 )) $((-7 / 2))", ["echo", "4096", "10", "16", "-3"]),
        ("echo a\\\n  b # c\n", ["echo", "a", "b"]),
        ("echo data#1000 '#x'", ["echo", "data#1000", "#x"]),
        ("A=(\n x=1 # one\n 'y=2 3'\n)\nA+=(z)\necho \"${A[@]}\" end", ["echo", "x=1", "y=2 3", "z", "end"]),
        ('e="--a 1"\necho $e "$e"', ["echo", "--a", "1", "--a 1"]),
        ('echo "$@" $* ""', ["echo", ""]),
        ('A=(--a 1)\necho "x ${A[*]}"', ["echo", "x --a 1"]),
        ("p=/a/b.sh\necho ${p##*/} ${p%.*} ${p%/*}", ["echo", "b.sh", "/a/b", "/a"]),
        ("export B=2 C=3; echo $B$C", ["echo", "23"]),
        ("echo a > out.txt 2>&1", ["echo", "a"]),
        ("cat <<EOF\nx=1\nEOF\necho b", ["echo", "b"]),
        ("f() {\n echo a\n}\necho ${1:-5} $# $@", ["echo", "5", "0"]),
        ("echo $'a b'c \"$'d'\"", ["echo", "a bc", "$'d'"]),
        ("x=1\nunset x y\necho ${x:-2}", ["echo", "2"]),
        ("x=1\n(unset x)\nif ((x == 1)); then let y=x; fi\necho $x", ["echo", "1"]),
        ("echo [\"'a'\",b]", ["echo", "['a',b]"]),
    ],
)
def test_words_are_expanded_as_a_shell_does(script, expected):
    assert words(script) == expected


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo $(rm -rf /)", "a command in the script is not run"),
        ("echo `rm -rf /`", "a command in the script is not run"),
        ("x=$(date)\necho a$x", "a command in the script is not run"),
        ("echo $nowhere", "$nowhere is not set in the script"),
        ("if nvidia-smi; then x=1; fi\necho $x", "it is set in a condition or a loop"),
        ("nvidia-smi && x=1\necho $x", "it is set in a condition or a loop"),
        ("x=1\n[ -d /data ] || x=2\necho $x", "it is set in a condition or a loop"),
        ('x=1\ncase "$(uname)" in\n Linux) x=2 ;;\nesac\necho $x', "it is set in a condition or a loop"),
        ("for x in 1 2; do y=$x; done\necho $y", "it is set in a condition or a loop"),
        ("f() {\n x=1\n}\necho $x", "it is set in a function"),
        ("echo $((1 / 0))", "division by zero"),
        ("echo $((2 ** 70))", "an exponent is too large"),
        ("echo $((x[0]))", "$x is not set in the script"),
        ('f() {\n echo a "$@"\n}', "it is known only where the function is called"),
        ("f() {\n echo a $*\n}", "it is known only where the function is called"),
        ("function f {\n n=${1:-5}; echo $n\n}", "it is known only where the function is called"),
        ("f() {\n if [ $# -gt 0 ]; then n=1; else n=2; fi\n echo $n\n}", "it is set in a condition or a loop"),
        ("echo a$'\\n'", "$'…' is not evaluated"),
        ("x=1\n((x *= 2))\necho $x", "it is changed by (("),
        ("x=1\n(( ++x ))\necho $x", "it is changed by (("),
        ("x=1\nlet x=2\necho $x", "it is changed by let"),
        ("x=1\nread -r x < f\necho $x", "it is changed by read"),
        ("x=1\nif nvidia-smi; then unset x; fi\necho $x", "it is changed by unset"),
        ("echo $1", "$1 is set when the script runs"),
        ("a=b\necho ${a//b/c}", "${a//b/c} is not evaluated"),
    ],
)
def test_what_only_a_run_would_tell_stays_unknown(script, why):
    (said,) = unknown(script)
    assert why in said or "is not integer arithmetic" in said


CASE = """
A=(n=5)
case "$device" in
    gpu) A+=(x=gpu) ;;
    npu | tp*)
        A+=(
            x=npu # the other device
        )
        n=2
        ;;
    *) A+=(x=none); exit 1 ;;
esac
echo "${A[@]}" $n
"""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("device=gpu\nn=1" + CASE, ["echo", "n=5", "x=gpu", "1"]),
        ("device=tpu\nn=1" + CASE, ["echo", "n=5", "x=npu", "2"]),
        ("device=cpu\nn=1" + CASE, ["echo", "n=5", "x=none", "1"]),
        ("x=1\nif [ ${y:-a} = a ]; then x=2; else x=3; fi\necho $x", ["echo", "2"]),
        ("x=1\nif [ 2 -gt 3 ]; then x=2; elif [[ ab == a* ]]; then x=3; else x=4; fi\necho $x", ["echo", "3"]),
        ("if [ a != a ]; then x=1; elif test -n ''; then x=2; else x=3; fi\necho $x", ["echo", "3"]),
        ("if ! [ -z '' ]; then x=1; else x=2; fi\necho $x", ["echo", "2"]),
        ("if [ a = a ] && { [ b = c ] || [ b = b ]; }; then x=1; else x=2; fi\necho $x", ["echo", "1"]),
        ("if [[ a == b || a == a && -n b ]]; then x=1; else x=2; fi\necho $x", ["echo", "1"]),
        ("[ 1 -gt 1 ] && x=a || x=b\necho $x", ["echo", "b"]),
        ("[ 2 -gt 1 ] && x=a || x=b\necho $x", ["echo", "a"]),
        ("x=1\nif [ a = b ]; then if nvidia-smi; then x=2; fi; x=3; fi\necho $x", ["echo", "1"]),
        ("x=1\nwhile [[ $# -gt 0 ]]; do case $1 in --x) x=$2; shift ;; esac; done\necho $x", ["echo", "1"]),
        ("x=1\n(x=2; true)\necho $x", ["echo", "1"]),
        ("x=1\n(\n(x=2)\ny=3\n)\necho $x", ["echo", "1"]),
        ("f() {\n local x=2\n}\ny=1\necho $y", ["echo", "1"]),
        ("if (( 3 % 2 )); then y=1; fi\nx=1\necho $x", ["echo", "1"]),
        ("# echo a \\\necho b", ["echo", "b"]),
        ("echo 'a\\\nb'", ["echo", "a\\\nb"]),
    ],
)
def test_branches_whose_condition_is_known_are_followed(script, expected):
    assert words(script) == expected


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("ab == a*", True),
        ("ab == b*", False),
        ("ab == a* && cd == c*", True),
        ("ab == b* && cd == c*", False),
        ("ab == a* && cd == d*", False),
        ("ab == b* || cd == c*", True),
        ("ab == a* || cd == d*", True),
        ("ab == b* || cd == d*", False),
        ("ab != a* || cd != d*", True),
        ("ab == b* || cd == c* && ef == f*", False),
        ("ab == a* && cd == d* || ef == e*", True),
    ],
)
def test_patterns_count_on_both_sides_of_an_operator(condition, holds):
    assert words(f"if [[ {condition} ]]; then x=yes; else x=no; fi\necho $x") == ["echo", "yes" if holds else "no"]


def test_commands_of_a_branch_that_is_not_taken_do_not_count():
    script = 's=fsdp\nif [ "$s" = megatron ]; then one; elif [ "$s" = fsdp ]; then two; else three; fi'
    assert [command.words[0].text for command in read_shell(script, {})] == ["[", "[", "two"]


def test_an_array_that_is_extended_in_an_open_condition_keeps_its_items():
    script = 'A=(n=5)\nif nvidia-smi; then A+=(x=1); fi\necho "${A[@]}"'
    said = {word.text: word.unknown for word in read_shell(script, {})[-1].words}
    assert said == {"echo": None, "n=5": None, "x=1": "it is set in a condition or a loop"}
    script = 'A=(n=5 x=2)\nif nvidia-smi; then A=(n=5 x=1); fi\necho "${A[@]}"'
    said = {word.text: bool(word.unknown) for word in read_shell(script, {})[-1].words}
    assert said == {"echo": False, "n=5": False, "x=2": True, "x=1": True}


def test_an_assignment_on_the_line_is_for_that_command():
    first, second = read_shell("N=8 one\ntwo", {})
    assert first.variables["N"].text == "8"
    assert "N" not in second.variables


@pytest.mark.parametrize(
    "script",
    [
        'X=5\nCMD="train --n $X"\neval "$CMD"',
        "X=5\neval 'train --n' '$X'",
        'X=5\nsrun -N 2 bash -c "cd /a && train --n $X"',
        "/bin/bash -lc 'X=5; train --n $X'",
        "X=5 sh -c 'train --n $X'",
        "eval 'eval \"X=5\"'; train --n $X",
        "X=5\nbash -c 'X=6'\ntrain --n $X",
    ],
)
def test_commands_in_a_text_are_read(script):
    assert ["train", "--n", "5"] in [[word.text for word in command.words] for command in read_shell(script, {})]


def test_a_text_that_only_a_run_would_tell_has_no_commands():
    for script in ('eval "$(conda shell.bash hook)"', "eval $NOWHERE", "bash -c 'a quote: \"'", "eval", "bash -c"):
        commands = read_shell(f"{script}\ntrain", {})
        assert [word.text for word in commands[-1].words] == ["train"]
    with pytest.raises(UserError, match="expands to more than"):
        read_shell("A='" + 'eval "$A"\n' * 5000 + "'\n" + 'eval "$A"\n' * 1000, {})


def test_a_run_in_a_text_is_converted(tmp_path):
    run = read_script('CMD="swift rlhf --rlhf_type grpo --beta 0"\neval "$CMD"', "run.sh")
    assert (run.library, run.keys["beta"]) == ("ms-swift", 0)


def test_arithmetic():
    assert evaluate_arithmetic("2 + 3 * 4 - 10 % 4", int) == 12
    assert evaluate_arithmetic("2 ** 3 ** 2", int) == 512
    assert evaluate_arithmetic("-(1 << 4)", int) == -16
    assert evaluate_arithmetic("n * 2", lambda name: 21) == 42
    for text in ("", "1 +", "(1", "1 2", "a.b", "9" * 30, "(" * 300 + "1" + ")" * 300, "1 ? 2 : 3", "9**20 * 9**20"):
        with pytest.raises(ArithmeticTextError):
            evaluate_arithmetic(text, lambda name: 1)


def test_values_of_a_command_line_have_types():
    assert [typed(text) for text in ("1e-6", "3", "0.", "True", "null", "[a,b]", "x:y", "-1", "a: ]", "None")] == [
        1e-6, 3, 0.0, True, None, ["a", "b"], "x:y", -1, "a: ]", None,
    ]  # fmt: skip


def test_text_of_a_command_line_is_kept_as_it_is():
    texts = ["Rule # 1", "a\nb", "Answer: x", "Observation:", "2026-01-31", "1:30", "- a", " x", "\n", "#", "&a"]
    assert [typed(text) for text in texts] == texts
    script = "swift rlhf --rlhf_type grpo --system 'One.\nAnswer: 1 # 2' --stop_words 'Observation:' b"
    keys = read_script(script, "s").keys
    assert (keys["system"], keys["stop_words"]) == ("One.\nAnswer: 1 # 2", ["Observation:", "b"])
    assert [typed(text) for text in ("'x'", '" y"', " [1, 2]", "{a: 1}", "")] == ["x", " y", [1, 2], {"a": 1}, None]


def test_a_mapping_of_hydra_needs_no_spaces():
    texts = ["{a:1,b:[1,2]}", "{a:{b:x:y},c:False}", "[{a:1}]", "{a:http://x}", "{'a,b:c':1}", '{"a": "x,y:z"}', "{a:}"]
    assert [typed(text) for text in texts] == [
        {"a": 1, "b": [1, 2]}, {"a": {"b": "x:y"}, "c": False}, [{"a": 1}], {"a": "http://x"}, {"a,b:c": 1},
        {"a": "x,y:z"}, {"a": None},
    ]  # fmt: skip


def test_an_apostrophe_in_double_quotes_closes_nothing():
    script = "A=\"$(echo \"it's\")\"\nB=$(cd \"$(dirname '(')\" && pwd)\nrun 'x' $(echo '(')y"
    assert words(script)[:2] == ["run", "x"]
    assert len(words(script)) == 3


def test_interpolation():
    keys = {"a.b": "${c}", "c": 4, "a.d": "${.b}", "e": "x${c}y", "f": "${oc.select:g,7}", "h": "${oc.env:HOME,z}"}
    assert interpolated(keys, {}) == {"a.b": 4, "c": 4, "a.d": 4, "e": "x4y", "f": 7, "h": "z"}
    for text, why in (("${x}", "x is not in the file"), ("${k}", "itself"), ("${eval:1+1}", "eval is not evaluated")):
        value = interpolated({"k": text}, {})["k"]
        assert isinstance(value, UnknownValue)
        assert why in value.why


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${.near}", "beside c"),
        ("${..near}", "beside b"),
        ("${...near}", "beside a"),
        ("${near}", "beside a"),
        ("${oc.select:.near,7}", "beside c"),
        ("${oc.select:..near,7}", "beside b"),
        ("${oc.select:..none,7}", 7),
    ],
)
def test_dots_lead_from_a_key_to_its_siblings_and_above(text, value):
    keys = {"a.b.c": text, "a.b.near": "beside c", "a.near": "beside b", "near": "beside a"}
    assert interpolated(keys, {})["a.b.c"] == value


def test_a_dictionary_of_hydra_and_a_deleted_key():
    script = "python3 -m verl.trainer.main_ppo ++a={b: 1} +c=2 c=3 ~c data.x=1 $EXTRA word"
    keys = read_script(script.replace("{b: 1}", "'{b: 1}'"), "s").keys
    assert (keys["a.b"], "c" in keys, keys["data.x"]) == (1, False, 1)
    assert isinstance(keys["$EXTRA"], UnknownValue)
    assert isinstance(keys["word"], UnknownValue)
    script = "python3 -m verl.trainer.main_ppo a.b=1 a.c=2 ~a.b=1 ~a.d=1"
    keys = read_script(script, "s").keys
    assert dict(keys) == {"a.c": 2}


def test_an_override_takes_the_place_of_a_section_of_the_file(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "gconfig: {n_samples: 4}\nactor: {path: m, reward_norm: {mean_level: group}}\ncritic: {path: m}\n"
    )
    script = "python3 x.py --config a.yaml gconfig.n_samples=8 gconfig='{top_p: 0.5}' critic=null ~actor.reward_norm"
    keys = read_script(script, "s", tmp_path).keys
    assert dict(keys) == {"gconfig.n_samples": 8, "gconfig.top_p": 0.5, "actor.path": "m", "critic": None}


def test_a_variable_that_is_not_set_is_no_value_of_the_option_before():
    keys = read_script("trl grpo --beta 0 $EXTRA --model_name_or_path $M --reward_funcs a b", "s").keys
    assert (keys["beta"], keys["reward_funcs"]) == (0, ["a", "b"])
    assert keys["$EXTRA"].why == "$EXTRA is not set in the script"
    assert isinstance(keys["model_name_or_path"], UnknownValue)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.py", "x = 1", "Python is not read; write the settings to JSON"),
        ("a.sh", "echo hello", "no training command of verl, TRL, ms-swift or AReaL in it"),
        ("a.sh", "swift sft --model m", "supervised fine-tuning (swift sft): not supported"),
        (
            "a.sh",
            "python -m verl.trainer.fsdp_sft_trainer a=b",
            "supervised fine-tuning (verl.trainer.fsdp_sft_trainer)",
        ),
        (
            "a.sh",
            "accelerate launch examples/scripts/dpo_vlm.py --beta 0.1",
            "learning from preferences (dpo_vlm.py): not",
        ),
        ("a.sh", "python sft.py --config a.yaml", "supervised fine-tuning (sft.py): not supported"),
        ("a.yaml", "run: echo hello\n", "no training command of verl, TRL, ms-swift or AReaL in it"),
        ("a.sh", "echo 'x", "a quote is not closed"),
        ("a.sh", 'echo "x', "a quote is not closed"),
        ("a.sh", "echo ${x", "is not closed"),
        ("a.sh", "echo " + "${x:-" * 500 + "}" * 500, "nested too deeply"),
        ("a.sh", "a=" + "x" * 60_000 + '\necho "$a$a$a"', "longer than 64 KiB"),
        ("a.sh", "A=(" + "x " * 15_000 + ")\necho ${A[@]} ${A[@]}", "more than 20000 words"),
        ("a.sh", "#" * (MOST_BYTES_READ + 1), "it has more than 1 MiB"),
        ("a.yaml", "x: " + "[" * 3000, "not valid YAML: it is nested too deeply"),
        ("a.yaml", "a: 1\n", "not a file of verl, TRL, ms-swift or AReaL"),
        ("a.yaml", "- 1\n", "neither a training command nor a mapping"),
        ("a.yaml", "algorithm: &a {x: *a}\n", "does an anchor contain itself"),
        ("a.json", "{", "not valid YAML"),
        ("a.yaml", "num_generations: many\nbeta: x\n", "num_generations: input should be a valid integer"),
        ("a.yaml", "num_generations: 8\nlearning_rate: [1]\n", "cannot be converted"),
        ("a.yaml", "num_generations: 8\nmax_steps: 1.5\n", "expected a whole number"),
    ],
    ids=lambda value: value[:20],
)
def test_what_cannot_be_read_is_one_line(tmp_path, name, text, said):
    from dapo_rl.convert.write_recipe import convert_run

    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        convert_run(read_run(path))
    line = str(caught.value)
    assert said in line
    assert line.startswith(str(path))
    assert "\n" not in line
    assert len(line) < 500


def test_no_file_and_no_text(tmp_path):
    with pytest.raises(UserError, match="no such file; a command line is given as dapo convert -- COMMAND"):
        read_run(tmp_path / "missing.sh")
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="it is not UTF-8 text"):
        read_run(tmp_path / "b")


def test_nothing_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = "touch a\n$(touch b)\nx=`touch c`\ntrl grpo --beta $(touch d) <(touch e) > f ${x:-$(touch g)}\n"
    read_script(script, "s")
    assert list(tmp_path.iterdir()) == []
