"""A model directory is data: nothing in it is run, whatever it asks for and whatever is answered on standard input."""

import ast
import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import REPOSITORY

from dapo_rl.config import DataSettings, ModelSettings
from dapo_rl.data import build_prompts, load_rows
from dapo_rl.errors import UserError
from dapo_rl.models.config_limits import check_config
from dapo_rl.models.load import TINY, load_model

CODE = """
from pathlib import Path
Path({trace!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class Own({base}):
    model_type = "own"
"""


class Directory:
    """A copy of the embedded model that would leave a trace if its code ran, and a user who says yes to everything."""

    def __init__(self, path, monkeypatch):
        self.path, self.trace = path / "model", path / "trace"
        shutil.copytree(TINY, self.path, copy_function=shutil.copy)
        self.answers = io.StringIO("y\n" * 9)
        monkeypatch.setattr("sys.stdin", self.answers)

    def edit(self, name, **changes):
        file = self.path / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    def code(self, name, base):
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(CODE.format(trace=str(self.trace), base=base))

    def load(self):
        try:
            return load_model(ModelSettings(name=str(self.path)))
        finally:
            assert not self.trace.exists(), "code of the directory ran"
            assert self.answers.tell() == 0, "something was asked"

    def message(self):
        with pytest.raises(UserError) as caught:
            self.load()
        text = str(caught.value)
        assert "\n" not in text
        assert "\x1b" not in text
        return text.replace(str(self.path), "it")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    return Directory(tmp_path, monkeypatch)


def refusal(what, file):
    return (
        f"model.name: {what} needs Python code of its own (auto_map in {file}), and no code from a model is ever run; "
        "use a model that transformers has a class for, or load it in Python and pass it to DAPOTrainer"
    )


@pytest.mark.parametrize("more", [{}, {"trust_remote_code": True}])
def test_code_for_the_config_is_refused(directory, more):
    directory.code("own_config.py", "LlamaConfig")
    directory.code("own_model.py", "LlamaForCausalLM")
    auto_map = {"AutoConfig": "own_config.Own", "AutoModelForCausalLM": "own_model.Own"}
    directory.edit("config.json", model_type="own", auto_map=auto_map, **more)
    assert directory.message() == refusal("it", "config.json")


def test_code_for_the_model_is_refused(directory):
    """transformers has a class for the configuration, and none for a causal language model of it."""
    directory.code("own_model.py", "LlamaForCausalLM")
    directory.edit("config.json", model_type="t5", auto_map={"AutoModelForCausalLM": "own_model.Own"})
    assert directory.message() == refusal("it", "config.json")


@pytest.mark.parametrize("auto_map", [["own_words.Own", None], {"AutoTokenizer": [None, "own_words.Own"]}])
def test_code_for_the_tokenizer_is_refused(directory, auto_map):
    directory.code("own_words.py", "PreTrainedTokenizerFast")
    directory.edit("tokenizer_config.json", tokenizer_class="Own", auto_map=auto_map)
    assert directory.message() == refusal("the tokenizer of it", "tokenizer_config.json")


def test_code_in_another_repository_is_refused(directory):
    directory.edit("config.json", model_type="own", auto_map={"AutoConfig": "someone/else--own_config.Own"})
    assert directory.message() == refusal("it", "config.json")


def test_where_transformers_has_a_class_it_is_taken_instead_of_the_code(directory):
    """Many published models bring the code from before transformers had their class."""
    directory.code("own_model.py", "LlamaForCausalLM")
    auto_map = {"AutoConfig": "own_model.Own", "AutoModelForCausalLM": "own_model.Own"}
    directory.edit("config.json", auto_map=auto_map)
    directory.edit("tokenizer_config.json", auto_map={"AutoTokenizer": ["own_model.Own", None]})
    model, _ = directory.load()
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"


def test_a_generate_function_of_its_own_is_not_loaded(directory):
    directory.code("custom_generate/generate.py", "object")
    model, _ = directory.load()
    assert model.generate.__func__.__module__ == "transformers.generation.utils"


class Runs:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def test_pickled_weights_are_tensors_and_nothing_else(directory):
    weights = load_file(directory.path / "model.safetensors")
    (directory.path / "model.safetensors").unlink()
    file = directory.path / "pytorch_model.bin"
    torch.save(weights, file)
    directory.load()
    expected = (
        "model.name: it cannot be loaded: its pickled weights are damaged or hold more than tensors, which is never "
        "run; save it as safetensors"
    )
    torch.save(weights | {"more": Runs(directory.trace)}, file)
    assert directory.message() == expected
    file.write_bytes(pickle.dumps(Runs(directory.trace)))
    assert directory.message() == expected


@pytest.mark.parametrize("ends", ["abc", [2, "x"], [[2]], {"a": 1}, 1.5, True])
def test_an_end_that_is_no_token_is_one_line(directory, ends):
    directory.edit("generation_config.json", eos_token_id=ends)
    odd = ends[-1] if isinstance(ends, list) else ends
    assert directory.message() == (
        f"model.name: generation_config.json of it: eos_token_id is {odd!r}, not the id of a token"
    )


@pytest.mark.parametrize("ends", [None, [], 2, [2, 3]])
def test_ends_that_are_tokens_are_taken(directory, ends):
    directory.edit("generation_config.json", eos_token_id=ends)
    assert directory.load()[0].generation_config.eos_token_id == ends


def test_a_value_that_transformers_refuses_is_named_with_the_reason(directory):
    directory.edit("config.json", num_hidden_layers="4")
    message = directory.message()
    assert "'num_hidden_layers'" in message
    assert "expected int, got str" in message


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("num_hidden_layers", 1_000_000, "1,000,000"),
        ("num_hidden_layers", 10**30, "1" + ",000" * 10),
        ("hidden_size", 10**9, "1,000,000,000"),
        ("vocab_size", 2**40, "1,099,511,627,776"),
        ("num_attention_heads", 10**7, "10,000,000"),
        ("max_position_embeddings", 10**12, "1,000,000,000,000"),
    ],
)
def test_a_size_that_no_model_has_is_named_before_anything_is_built(directory, key, value, shown):
    directory.edit("config.json", **{key: value})
    assert f"config.json says {key} {shown}, and no model has over" in directory.message()


def test_sizes_of_nested_configs_and_of_experts_are_checked():
    check_config({"num_hidden_layers": 61, "n_routed_experts": 384, "vocab_size": 262_144, "hidden_size": 18_432}, "m")
    with pytest.raises(UserError, match=r"config.json says n_layer 9,999, and no model has over 2,048"):
        check_config({"text_config": {"n_layer": 9_999}}, "m")
    with pytest.raises(UserError, match=r"2,000 layers of 60,000 experts"):
        check_config({"num_hidden_layers": 2000, "text_config": {"num_experts": 60_000}}, "m")


def test_a_config_of_any_size_is_not_read(directory):
    path = directory.path / "config.json"
    path.write_text(path.read_text() + " " * (33 << 20))
    assert "config.json has more than 32 MiB" in directory.message()


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        "{{ cycler.__init__.__globals__.os.open('TRACE', 64) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(messages[0]) }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 'a' * ",
        "{{ '\\ud800' }}",
        "{{ 'a' * 10 ** 10 }}",
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{{ '{:>4000000000}'.format(1) }}",
        "{{ 'a'|center(2000000000) }}",
        "{% for i in range(100) %}{{ messages[0].content.ljust(1000000) }}{% endfor %}",
    ],
)
def test_a_chat_template_has_a_sandbox(directory, template):
    (directory.path / "chat_template.jinja").write_text(template.replace("TRACE", str(directory.trace)))
    _, tokenizer = directory.load()
    rows = load_rows([{"prompt": [{"role": "user", "content": "1+1?"}]}])
    with pytest.raises(UserError, match=r"row 0: the chat template rejects it: \S+") as caught:
        build_prompts(rows, tokenizer, DataSettings())
    assert "\n" not in str(caught.value)
    assert not directory.trace.exists()


@pytest.mark.slow
def test_a_template_that_takes_too_long_is_ended_and_the_next_one_rendered(directory):
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (directory.path / "chat_template.jinja").write_text(f"{{% if messages[0].content == 'x' %}}{loops}{{% endif %}}ok")
    _, tokenizer = directory.load()
    rows = load_rows([{"prompt": [{"role": "user", "content": text}]} for text in ("a", "x", "b")])
    found = build_prompts(rows, tokenizer, DataSettings())
    assert [prompt.text for prompt in found.prompts] == ["ok", "ok"]
    assert [str(bad) for bad in found.bad] == ["row 1: the chat template rejects it: it takes more than 5 seconds"]


def test_a_template_is_rendered_as_transformers_renders_it(directory):
    template = (
        "{{ bos_token }}{%- for m in messages %}<{{ m['role'] }}>{{ m.content | trim }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{{ messages | tojson }}{% endif %}"
    )
    (directory.path / "chat_template.jinja").write_text(template)
    _, tokenizer = directory.load()
    for last in ("user", "assistant"):
        messages = [{"role": "system", "content": " é\u2028\n"}, {"role": last, "content": "<b>1+1</b>"}]
        begun = last == "assistant"
        options = {"add_generation_prompt": not begun, "continue_final_message": begun}
        expected = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        (prompt,) = build_prompts(load_rows([{"prompt": messages}]), tokenizer, DataSettings()).prompts
        assert prompt.text == expected


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "LLM" or (called.startswith("Auto") and called.split(".")[-1] in LOADS):
                yield called, {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}


LOADS = ("from_pretrained", "from_config")


@pytest.mark.slow
def test_every_call_that_loads_a_model_says_that_its_code_is_not_trusted():
    found = [
        (f"{path.name}: {name}", keywords.get("trust_remote_code"))
        for path in sorted((REPOSITORY / "src").rglob("*.py"))
        for name, keywords in calls(ast.parse(path.read_text()))
    ]
    assert len(found) >= 7
    assert [name for name, trusted in found if trusted != "False"] == []
