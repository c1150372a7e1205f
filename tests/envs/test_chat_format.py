"""A conversation of several turns is, token by token, what the engine saw."""

import socket
import sys

import pytest
from chat_tokenizers import tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from dapo_rl.envs.chat_format import PlainText, chat_format
from dapo_rl.envs.renderer_format import RendererFormat
from dapo_rl.envs.template_format import DATE, TemplateFormat
from dapo_rl.errors import UserError

FAMILIES = ["qwen2.5", "qwen3", "qwen3-instruct", "llama-3", "llama-3.2", "smollm2", "tiny", "plain"]
WITH_TOOLS = ["qwen2.5", "qwen3", "qwen3-instruct", "llama-3.2"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Finds “it”.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    }
    for name in ("find", "look_up")
]
ODD = [
    "<|im_end|>",
    "<|im_start|>",
    "<|eot_id|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<eos>",
    "\n\n",
]
words = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
contents = st.lists(words | st.sampled_from([*ODD, " the", "ab", "{}"]), max_size=5).map("".join)
answers = st.lists(st.sampled_from([" the", "ab", "é", "stall", "\n", "{", "7", "in"]), min_size=1, max_size=6).map(
    lambda parts: f"a{''.join(parts)}."
)
"""What a policy may write that no template changes when it renders it again."""


def formats(family):
    """The format of a family, and that of its template alone, as without `renderers`."""
    tokenizer = tokenizer_of(family)
    found = chat_format(tokenizer)
    alone = TemplateFormat(tokenizer, "auto", {}) if isinstance(found, RendererFormat) else None
    return [found] if alone is None else [found, alone]


FORMATS = {family: formats(family) for family in FAMILIES}


def of(family):
    return FORMATS[family][0]


def by_template(tokenizer, messages, tools=(), **options):
    """The template's own text."""
    dated = {"date_string": DATE} if "date_string" in tokenizer.chat_template else {}
    return tokenizer.apply_chat_template(
        messages, tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **dated, **options
    )


def spelt(tokenizer, text):
    """A text in the tokenizer's smallest tokens, as it would not write it itself."""
    return [token for letter in text for token in tokenizer(letter, add_special_tokens=False)["input_ids"]]


def encoded(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_the_families_use_what_is_there():
    assert {family: type(of(family)) for family in FAMILIES} == {
        **dict.fromkeys(["qwen2.5", "qwen3-instruct", "llama-3", "smollm2", "tiny"], TemplateFormat),
        **dict.fromkeys(["qwen3", "llama-3.2"], RendererFormat),
        "plain": PlainText,
    }
    assert [of(family).supports_tools for family in FAMILIES] == [family in WITH_TOOLS for family in FAMILIES]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_before_and_suffix_are_the_conversation_as_the_template_writes_it(family, data):
    """However the policy spelt its turns, and whether they were cut: the sampled tokens stay, and the whole reads as
    the template writes it."""
    tokenizer = tokenizer_of(family)
    tools = TOOLS if family in WITH_TOOLS and data.draw(st.booleans(), "tools") else []
    first = [{"role": "user", "content": data.draw(contents, "first")}]
    if data.draw(st.booleans(), "system"):
        first.insert(0, {"role": "system", "content": data.draw(contents, "system")})
    for form in FORMATS[family]:
        messages = list(first)
        ids = form.prompt(messages, tools)
        if tokenizer.chat_template:
            assert ids == encoded(tokenizer, by_template(tokenizer, messages, tools))
        all_canonical = True
        for _ in range(data.draw(st.integers(1, 3), "turns")):
            answer = data.draw(answers, "answer")
            canonical = data.draw(st.booleans(), "canonical")
            turn = (encoded if canonical else spelt)(tokenizer, answer)
            all_canonical &= canonical
            cut = data.draw(st.booleans(), "cut")
            closed = [] if cut or not closes(tokenizer) else [tokenizer.eos_token_id]
            new = data.draw(observations(tools), "new")
            before = ids + turn + closed
            suffix = form.suffix(before, new, tools)
            if suffix is None:  # only thoughts, or what looks like them, are rewritten
                assert family.startswith("qwen3")
                assert {"<think>", "</think>"} & set(tokenizer.convert_ids_to_tokens(before))
                break
            messages += [{"role": "assistant", "content": answer}, *new]
            ids = before + suffix
            if family == "plain":
                whole = joined(tokenizer, messages, len(first))
            else:
                whole = by_template(tokenizer, messages, tools)
            assert decoded(tokenizer, ids) == whole
            if all_canonical and tokenizer.chat_template:
                assert ids == encoded(tokenizer, whole)


def closes(tokenizer):
    """Whether the template ends turns with a token."""
    return tokenizer.eos_token != "<eos>"


def joined(tokenizer, messages, first):
    """The plain text of a conversation whose prompt has `first` messages; observations here are one message each."""
    opening = "\n\n".join(message["content"] for message in messages[:first])
    rest = (
        message["content"] if message["role"] == "assistant" else f"\n{message['content']}\n"
        for message in messages[first:]
    )
    return f"{tokenizer.bos_token}{opening}{''.join(rest)}"


def observations(tools):
    users = contents.map(lambda text: [{"role": "user", "content": text}])
    if not tools:
        return users
    results = st.lists(contents, min_size=1, max_size=3)
    return users | results.map(lambda texts: [{"role": "tool", "name": "find", "content": text} for text in texts])


@pytest.mark.parametrize("family", [family for family in FAMILIES if closes(tokenizer_of(family))])
def test_an_end_of_turn_is_written_once(family):
    tokenizer = tokenizer_of(family)
    for form in FORMATS[family]:
        ids = [*form.prompt([{"role": "user", "content": "hi"}]), *encoded(tokenizer, "hello")]
        new = [{"role": "user", "content": f"more {tokenizer.eos_token} of it"}]
        cut = form.suffix(ids, new)
        assert cut[0] == tokenizer.eos_token_id
        assert form.suffix([*ids, tokenizer.eos_token_id], new) == cut[1:]


def test_another_end_of_text_ends_a_turn_too():
    """Qwen stops at either; its template writes one."""
    tokenizer = tokenizer_of("qwen2.5")
    ids = [*of("qwen2.5").prompt([{"role": "user", "content": "hi"}]), *encoded(tokenizer, "hello<|endoftext|>")]
    suffix = of("qwen2.5").suffix(ids, [{"role": "user", "content": "more"}])
    assert decoded(tokenizer, suffix) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_an_end_inside_of_a_turn_stays(family):
    """An engine that ignores the end of the sequence goes on after it."""
    tokenizer = tokenizer_of(family)
    for form in FORMATS[family]:
        turn = [*encoded(tokenizer, "one"), tokenizer.eos_token_id, *encoded(tokenizer, "two")]
        before = [*form.prompt([{"role": "user", "content": "hi"}]), *turn]
        suffix = form.suffix(before, [{"role": "user", "content": "more"}])
        assert suffix[0] == tokenizer.eos_token_id
        assert suffix[1:] == form.suffix([*before, tokenizer.eos_token_id], [{"role": "user", "content": "more"}])


def test_qwen3_drops_thoughts_before_a_question_but_not_before_the_result_of_a_tool():
    tokenizer = tokenizer_of("qwen3")
    messages = [{"role": "user", "content": "What is it?"}]
    for form in FORMATS["qwen3"]:
        turn = encoded(tokenizer, "<think>\nHm.\n</think>\n\nLet me see.<|im_end|>")
        before = [*form.prompt(messages, TOOLS), *turn]
        assert form.suffix(before, [{"role": "user", "content": "Well?"}], TOOLS) is None
        result = {"role": "tool", "content": "7"}
        thought = {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm."}
        whole = by_template(tokenizer, [*messages, thought, result], TOOLS)
        assert decoded(tokenizer, before + form.suffix(before, [result], TOOLS)) == whole
        cut = [*form.prompt(messages, TOOLS), *encoded(tokenizer, "<think>\nHm")]
        assert form.suffix(cut, [{"role": "user", "content": "Well?"}], TOOLS) is None


@pytest.mark.parametrize(("family", "reads"), [("qwen2.5", False), ("llama-3", False), ("r1", True)])
def test_earlier_turns_are_searched_for_thoughts_only_if_the_template_drops_them(family, reads, monkeypatch):
    tokenizer = tokenizer_of(family)
    form = TemplateFormat(tokenizer, "auto", {})
    before = [
        *form.prompt([{"role": "user", "content": "Hi"}]),
        *encoded(tokenizer, "<think>\nHm.\n</think>\n\nHello."),
    ]
    assert form._thought(before) == reads
    decoding = []
    monkeypatch.setattr(tokenizer, "decode", lambda *given, **named: decoding.append(given))
    form.suffix(before, [{"role": "user", "content": "More"}])
    assert not decoding  # those of r1 are tokens


def test_qwen3_without_thinking_goes_on_without_a_fork():
    tokenizer = tokenizer_of("qwen3")
    form = chat_format(tokenizer, template_kwargs={"enable_thinking": False})
    messages = [{"role": "user", "content": "What is it?"}]
    before = [*form.prompt(messages), *encoded(tokenizer, "It.<|im_end|>")]
    assert decoded(tokenizer, form.prompt(messages)) == by_template(tokenizer, messages, enable_thinking=False)
    suffix = form.suffix(before, [{"role": "user", "content": "Well?"}])
    assert decoded(tokenizer, suffix).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_template_that_always_drops_thoughts_forks():
    tokenizer = tokenizer_of("r1")
    form = chat_format(tokenizer)
    before = [*form.prompt([{"role": "user", "content": "Hi"}]), *encoded(tokenizer, "Hm.\n</think>\n\nHello.")]
    assert form.suffix([*before, tokenizer.eos_token_id], [{"role": "user", "content": "More"}]) is None
    parsed = form.parse([*encoded(tokenizer, "Hm.\n</think>\n\nHello."), tokenizer.eos_token_id])
    assert (parsed.reasoning, parsed.text) == ("Hm.", "Hello.")
    assert form.parse(encoded(tokenizer, "Hm. Still")).reasoning == "Hm. Still"


@pytest.mark.parametrize("family", ["strict", "skipping"])
def test_templates_in_which_results_must_follow_calls(family):
    tokenizer = tokenizer_of(family)
    form = chat_format(tokenizer)
    turn = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    before = [*form.prompt([{"role": "user", "content": "hi"}]), *spelt(tokenizer, turn)]
    suffix = form.suffix(before, [{"role": "tool", "content": "found"}])
    assert decoded(tokenizer, suffix) == "<|im_end|>\n<|im_start|>tool\nfound<|im_end|>\n<|im_start|>assistant\n"
    assert form.suffix([*before, tokenizer.eos_token_id], [{"role": "tool", "content": "found"}]) == suffix[1:]


def test_the_last_message_may_begin_the_turn():
    for family in ("qwen2.5", "qwen3"):
        tokenizer = tokenizer_of(family)
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
        assert decoded(tokenizer, of(family).prompt(messages)).endswith("Well")


def test_openai_messages_are_taken_as_they_are():
    """Content in parts, arguments as a text, no content beside calls."""
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"word": "é"}'}}
    theirs = [
        {"role": "user", "content": [{"type": "text", "text": "Find "}, {"type": "text", "text": "it"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "found"}]},
    ]
    function = {"name": "find", "arguments": {"word": "é"}}
    ours = [
        {"role": "user", "content": "Find it"},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "found"},
    ]
    for family in WITH_TOOLS:
        for form in FORMATS[family]:
            assert form.prompt(theirs, TOOLS) == form.prompt(ours, TOOLS)
            assert '{"word": "é"}' in decoded(tokenizer_of(family), form.prompt(theirs, TOOLS))


def test_models_that_cannot_be_told_of_tools():
    for family in set(FAMILIES) - set(WITH_TOOLS):
        with pytest.raises(
            UserError,
            match=r"^env\.tools: (the chat template of .+ has no place for tools|.+ has no chat template); take a",
        ):
            of(family).prompt([{"role": "user", "content": "hi"}], TOOLS)
        named = chat_format(tokenizer_of(family), "hermes")
        assert named.supports_tools
        assert named.prompt([{"role": "user", "content": "hi"}], TOOLS)


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_tool_names(family):
    def named(name):
        return [{"type": "function", "function": {**TOOLS[0]["function"], "name": name}}]

    for form in FORMATS[family]:
        for name in ("find", "files.read", "a-b", "größe"):
            assert form.prompt([{"role": "user", "content": "hi"}], named(name))
        for name in ('say "hi"', "back\\slash", "a\nb", ""):
            with pytest.raises(
                UserError, match=r"^env\.tools: .+ cannot express the tool name .+; use letters"
            ) as error:
                form.prompt([{"role": "user", "content": "hi"}], named(name))
            assert "\n" not in str(error.value)


def test_a_format_that_does_not_exist():
    with pytest.raises(UserError, match=r"env\.tool_format=herms: no such tool format; did you mean hermes\?"):
        chat_format(tokenizer_of("qwen2.5"), "herms").parse([])


def test_messages_that_the_template_rejects():
    with pytest.raises(UserError, match=r"env: the chat template of .+ rejects the messages"):
        of("smollm2").prompt([{"role": "user", "content": {"no": "text"}}])


def test_nothing_is_asked_of_the_network(monkeypatch):
    def refuse(*args):
        raise AssertionError("the network is not asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert isinstance(chat_format(tokenizer_of("qwen3")), RendererFormat)
    assert isinstance(chat_format(tokenizer_of("qwen2.5")), TemplateFormat)


def test_without_the_package_the_template_is_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "renderers", None)
    assert isinstance(chat_format(tokenizer_of("qwen3")), TemplateFormat)
