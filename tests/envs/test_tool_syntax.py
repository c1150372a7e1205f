"""A turn's text, thoughts and tool calls are read from its tokens; nothing a model writes raises an exception."""

import pytest
from chat_tokenizers import tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.envs.chat_format import chat_format
from dapo_rl.envs.protocol import ToolCall
from dapo_rl.envs.template_format import TemplateFormat

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
QWEN = chat_format(tokenizer_of("qwen2.5"))
QWEN3 = [chat_format(tokenizer_of("qwen3")), TemplateFormat(tokenizer_of("qwen3"), "auto", {})]
LLAMA = [chat_format(tokenizer_of("llama-3.2")), TemplateFormat(tokenizer_of("llama-3.2"), "auto", {})]
HERMES = chat_format(tokenizer_of("smollm2"), "hermes")
"""Its tokenizer has no token for a call's beginning."""
CALLS = [(QWEN, "qwen2.5"), *((form, "qwen3") for form in QWEN3), (HERMES, "smollm2")]


def ids_of(family, text):
    return tokenizer_of(family)(text, add_special_tokens=False)["input_ids"]


def spelt(family, text):
    return [token for letter in text for token in ids_of(family, letter)]


@pytest.mark.parametrize(("form", "family"), CALLS)
def test_calls_among_text(form, family):
    call = '<tool_call>\n{"name": "find", "arguments": {"word": "é\\n", "n": 2}}\n</tool_call>'
    parsed = form.parse(ids_of(family, f"Well.\n{call}\n{call}<|im_end|>"), TOOLS)
    assert parsed.text == "Well."
    assert parsed.tool_calls == (ToolCall("find", {"word": "é\n", "n": 2}),) * 2
    assert parsed.reasoning == ""


@pytest.mark.parametrize(
    ("written", "name", "error"),
    [
        ('{"name": "find", "arguments": {', "", "not valid JSON: "),
        ("find it", "", "not valid JSON: "),
        ("[" * 100_000, "", "not valid"),
        ('{"name": "find", "arguments": {"n": ' + "9" * 5000 + "}}", "", "not valid"),
        ('{"name": "find", "arguments": {"n": NaN}}', None, "not valid JSON: "),
        ('{"name": "find", "arguments": {"n": "\\ud800"}}', "find", "not valid JSON: half a surrogate"),
        ('{"name": "find", "arguments": [1]}', "find", "the arguments are not a JSON object"),
        ('{"name": "find", "arguments": "word"}', "find", "not valid JSON: "),
        ('{"name": 5, "arguments": {}}', "", "the tool call has no name"),
        ('{"arguments": {}}', "", "the tool call has no name"),
        ("[]", "", ""),
        ("", "", "not valid JSON: "),
    ],
)
@pytest.mark.parametrize(("form", "family"), CALLS)
def test_malformed_calls_say_why(form, family, written, name, error):
    parsed = form.parse(ids_of(family, f"<tool_call>\n{written}\n</tool_call><|im_end|>"), TOOLS)
    (call,) = parsed.tool_calls
    assert call.error.startswith(error)
    assert call.error
    assert "\n" not in call.error
    assert name is None or call.name == name
    assert written in (call.raw or parsed.text)
    assert call.arguments == {}


@pytest.mark.parametrize(("form", "family"), CALLS)
def test_a_call_that_was_cut_is_malformed(form, family):
    (call,) = form.parse(ids_of(family, 'Well <tool_call>{"name": "find"'), TOOLS).tool_calls
    assert "end" in call.error
    assert '{"name": "find"' in call.raw


@pytest.mark.parametrize(("form", "family"), CALLS[:-1])
def test_a_call_spelt_with_other_tokens_is_text(form, family):
    text = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    parsed = form.parse(spelt(family, text), TOOLS)
    assert parsed.tool_calls == ()
    assert parsed.text == text


def test_thoughts():
    for form in QWEN3:
        call = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
        parsed = form.parse(ids_of("qwen3", f"<think>\nHm. {call}\n</think>\n\nWell.\n{call}<|im_end|>"), TOOLS)
        assert parsed.text == "Well."
        assert parsed.tool_calls == (ToolCall("find"),)
        assert parsed.reasoning.startswith("Hm.")
        alone = form.parse(ids_of("qwen3", "<think>\nHm.\n</think>\n\nWell.<|im_end|>"), TOOLS)
        assert (alone.text, alone.tool_calls) == ("Well.", ())
        cut = form.parse(ids_of("qwen3", "<think>\nHm."))
        assert (cut.text, cut.reasoning.strip()) == ("", "Hm.")
        plain = form.parse(ids_of("qwen3", "Well.<|im_end|>"))
        assert (plain.text, plain.reasoning) == ("Well.", "")


def test_a_model_that_does_not_mark_thoughts_keeps_them_in_its_text():
    text = "<think>Hm</think> Well"
    assert QWEN.parse(ids_of("qwen2.5", text)).text == text


def test_llama_writes_a_call_as_its_whole_turn():
    for form in LLAMA:
        written = '{"name": "find", "parameters": {"word": "x"}}<|eot_id|>'
        assert form.parse(ids_of("llama-3.2", written), TOOLS).tool_calls == (ToolCall("find", {"word": "x"}),)
        assert form.parse(ids_of("llama-3.2", written)).text == written.removesuffix("<|eot_id|>")
        (broken,) = form.parse(ids_of("llama-3.2", '{"name": "find", "parameters": {<|eot_id|>'), TOOLS).tool_calls
        assert broken.error.startswith("not valid JSON: ")
        assert broken.raw == '{"name": "find", "parameters": {'
        assert form.parse(ids_of("llama-3.2", '{"answer": 3}'), TOOLS).text == '{"answer": 3}'


def test_other_formats_by_name():
    form = chat_format(tokenizer_of("qwen2.5"), "qwen3.5")
    written = "Well <tool_call>\n<function=find>\n<parameter=word>\nan x\n</parameter>\n</function>\n</tool_call>"
    parsed = form.parse(ids_of("qwen2.5", written), TOOLS)
    assert parsed.text == "Well"
    assert parsed.tool_calls == (ToolCall("find", {"word": "an x"}),)


PARTS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "find"',
    ', "arguments": {}}',
    "<|im_end|>",
    "x",
]


@pytest.mark.slow
@given(parts=st.lists(st.sampled_from(PARTS) | st.text(max_size=5), max_size=8), letters=st.booleans())
@settings(max_examples=150, deadline=None)
def test_nothing_raises(parts, letters):
    for form, family in (
        *CALLS,
        *((form, "llama-3.2") for form in LLAMA),
        (chat_format(tokenizer_of("plain")), "plain"),
    ):
        text = "".join(parts).encode(errors="ignore").decode()
        parsed = form.parse((spelt if letters else ids_of)(family, text), TOOLS)
        assert all(call.name or call.error for call in parsed.tool_calls)
