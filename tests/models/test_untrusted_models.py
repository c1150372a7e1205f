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
    "template",
    [
        "{{ cycler.__init__.__globals__.os.open('TRACE', 64) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(messages[0]) }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ 'a' * ",
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


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "LLM" or (called.startswith("Auto") and called.split(".")[-1] in LOADS):
                yield called, {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}


LOADS = ("from_pretrained", "from_config")


def test_every_call_that_loads_a_model_says_that_its_code_is_not_trusted():
    found = [
        (f"{path.name}: {name}", keywords.get("trust_remote_code"))
        for path in sorted((REPOSITORY / "src").rglob("*.py"))
        for name, keywords in calls(ast.parse(path.read_text()))
    ]
    assert len(found) >= 7
    assert [name for name, trusted in found if trusted != "False"] == []
