"""`data.chat_template_kwargs`: passed to the chat template, or refused where it would have no effect."""

import pytest

from dapo_rl.config import Config, DataSettings
from dapo_rl.data import held_out_prompts, training_prompts
from dapo_rl.errors import UserError

THINKS = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
CHAT = [{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}]
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def thinker(make_tokenizer):
    return make_tokenizer(THINKS)


def text_of(rows, tokenizer, **settings):
    (trained,) = training_prompts(rows, tokenizer, DataSettings(**settings)).prompts
    (held_out,) = held_out_prompts(rows, tokenizer, DataSettings(**settings), False, None).prompts
    assert trained.text == held_out.text
    return trained.text


def test_arguments_reach_the_template_in_training_and_evaluation(thinker):
    assert text_of(CHAT, thinker) == "[user]1+1[assistant]"
    assert text_of(CHAT, thinker, chat_template_kwargs={"enable_thinking": True}) == "[user]1+1[assistant]"
    assert text_of(CHAT, thinker, chat_template_kwargs=OFF) == "[user]1+1[assistant]<think></think>"
    plain = [{"prompt": "1+1", "answer": "2"}]
    given = {"chat_template_kwargs": OFF, "chat_template": "always"}
    assert text_of(plain, thinker, **given) == "[user]1+1[assistant]<think></think>"


def test_arguments_without_effect_are_refused(thinker, chat_tokenizer):
    with pytest.raises(
        UserError, match=r"^data.chat_template_kwargs.enable_thinkng: .*; did you mean enable_thinking\?"
    ):
        text_of(CHAT, thinker, chat_template_kwargs={"enable_thinkng": False})
    with pytest.raises(UserError, match="the tokenizer's chat template has no such argument; leave it out"):
        text_of(CHAT, chat_tokenizer, chat_template_kwargs=OFF)
    with pytest.raises(UserError, match=r"has no effect on prompts of plain text; set data.chat_template=always"):
        text_of([{"prompt": "1+1", "answer": "2"}], thinker, chat_template_kwargs=OFF)


def test_several_templates_without_a_default_are_one_line(make_tokenizer):
    assert text_of(CHAT, make_tokenizer({"default": THINKS, "rag": "x"})) == "[user]1+1[assistant]"
    with pytest.raises(UserError, match=r"^data.train: none of 1 row .* rejects it: .* no default specified") as caught:
        text_of(CHAT, make_tokenizer({"tool_use": THINKS, "rag": "x"}))
    assert "\n" not in str(caught.value)


def test_on_the_command_line():
    config = Config.load(None, ["data.chat_template_kwargs={enable_thinking: false}"])
    assert config.data.chat_template_kwargs == OFF
    assert Config.load(None, ["data.chat_template_kwargs.enable_thinking=false"]) == config
    assert Config.build(config.resolved()).data == config.data


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.chat_template_kwargs.add_generation_prompt=false"], "add_generation_prompt is decided by the run"),
        (["data.chat_template_kwargs.tools=[]"], "tools is decided by the run"),
        (
            ["data.chat_template_kwargs.x=1", "data.chat_template=never"],
            "x with data.chat_template=never, which applies",
        ),
        (["data.chat_template_kwargs=3"], "data.chat_template_kwargs"),
        (["chat_template_kwargs.enable_thinking=false"], "here it is data.chat_template_kwargs.enable_thinking=false"),
    ],
)
def test_mistakes(words, message):
    with pytest.raises(UserError) as error:
        Config.load(None, words)
    assert message in str(error.value)
