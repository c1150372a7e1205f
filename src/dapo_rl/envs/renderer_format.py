"""The package `renderers` as a chat format, for the model families that it knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dapo_rl.base.quote import one_line
from dapo_rl.data.chat import encode, one_thread
from dapo_rl.envs.messages import PROBE, QUESTION, ToolCheck, plain_message, rejected
from dapo_rl.envs.protocol import Message, Messages, ToolCall, Tools, tool_call
from dapo_rl.envs.template_format import TemplateFormat
from dapo_rl.envs.tool_syntax import Parsed, decoded_text, end_ids, packaged_call, tool_syntax

FAMILIES = (
    *("qwen3", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "llama-3", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3"),
    *("minimax-m2", "deepseek-v3", "deepseek-r1", "kimi-k2", "hy3", "laguna-xs.2", "laguna-m.1", "laguna-xs-2.1"),
    *("laguna-s-2.1", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
)
"""Those for text that load nothing from a hub."""
Probe = tuple[Messages, Tools, bool]
"""Messages, tools, and whether a generation prompt follows."""


def renderer_format(
    tokenizer: Any, tool_format: str, template_kwargs: Mapping[str, Any], template: TemplateFormat
) -> RendererFormat | None:
    """The renderer that writes the same tokens as the tokenizer's chat template, whatever the model's name is; None if
    there is none, or the package is not installed."""
    try:
        from renderers import config_from_name, create_renderer
    except ImportError:
        return None
    bare, wanted = TemplateFormat(tokenizer, "auto", {}), dict[int, Any]()
    for name in FAMILIES:
        try:
            renderer = create_renderer(tokenizer, config_from_name(name))
        except Exception:  # its special tokens are not there
            continue
        if not _agrees(renderer, tokenizer, bare, wanted, _probes()):
            continue
        if template_kwargs:
            try:
                renderer = create_renderer(
                    tokenizer, config_from_name(name), chat_template_kwargs=dict(template_kwargs)
                )
            except Exception:  # an argument that the renderer does not know
                return None
            # With arguments it may keep what the template drops from earlier turns; a first turn must be the same.
            if not _agrees(renderer, tokenizer, template, {}, _probes()[:2]):
                return None
        return RendererFormat(tokenizer, name, renderer, tool_format, template)
    return None


class RendererFormat:
    """A renderer of the package. What it cannot do is left to the chat template."""

    def __init__(self, tokenizer: Any, family: str, renderer: Any, tool_format: str, template: TemplateFormat) -> None:
        self._tokenizer, self._renderer, self._template = tokenizer, renderer, template
        self.family = family
        self._named = tool_format != "auto"
        # A Llama's malformed calls are text to the package.
        self._syntax = tool_syntax("llama3", tokenizer) if family == "llama-3" else None
        self._ends = end_ids(tokenizer)
        with one_thread():
            asked = renderer.render_ids([dict(QUESTION)], add_generation_prompt=True)
            self._generation: list[int] = asked[len(renderer.render_ids([dict(QUESTION)])) :]
        self._tool_check = ToolCheck(tokenizer, self._ids, self.parse)

    @property
    def supports_tools(self) -> bool:
        return self._named or self._tool_check.has_place

    def prompt(self, messages: Messages, tools: Tools = ()) -> list[int]:
        if tools and not self._named:
            self._tool_check(tools)
        if messages and messages[-1].get("role") == "assistant":
            return self._template.prompt(messages, tools)
        return self._ids(messages, tools)

    def suffix(self, before: Sequence[int], messages: Messages, tools: Tools = ()) -> list[int] | None:
        before = list(before)
        new = [plain_message(message) for message in messages]
        known = [dict(tool) for tool in tools] or None
        for start in (self._turn_start(before), len(before) - 1):
            # The bridge goes back to the last end of a turn, which may be inside of one: then all but its end is given
            # to it as the prompt.
            if not 0 < start < len(before):
                continue
            try:
                with one_thread():
                    bridged = self._renderer.bridge_to_next_turn(before[:start], before[start:], new, tools=known)
            except Exception:  # it does not know these messages
                return None
            if bridged is None:  # it fears for earlier thoughts, of which there may be none
                return self._template.suffix(before, messages, tools)
            ids = [int(token) for token in bridged.token_ids]
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return None

    def parse(self, turn_ids: Sequence[int], tools: Tools = ()) -> Parsed:
        if self._named:
            return self._template.parse(turn_ids, tools)
        if self._syntax is not None:
            return self._syntax(turn_ids, tools)
        try:
            found = self._renderer.parse_response(
                list(turn_ids), tools=[dict(tool) for tool in tools] or None, prompt_ids=self._generation
            )
            calls = tuple(packaged_call(each) for each in found.tool_calls)
            return Parsed(str(found.content or ""), calls, str(found.reasoning_content or ""))
        except Exception as error:  # what the model wrote is too odd for the parser
            end = next((n for n, token in enumerate(turn_ids) if token in self._ends), len(turn_ids))
            call = ToolCall("", error=f"not valid: {one_line(error, 120)}")
            return Parsed(decoded_text(self._tokenizer, turn_ids[:end]), (call,))

    def _ids(self, messages: Messages, tools: Tools) -> list[int]:
        try:
            with one_thread():
                return _render(self._renderer, [plain_message(message) for message in messages], tools, True)
        except Exception as error:
            raise rejected(self._tokenizer, error) from None

    def _turn_start(self, before: list[int]) -> int:
        """Where the policy's last turn begins: after the last generation prompt."""
        length = len(self._generation)
        starts = range(len(before) - length, -1, -1)
        return next((n + length for n in starts if before[n : n + length] == self._generation), 0)


def _render(renderer: Any, messages: Messages, tools: Tools, generation: bool) -> list[int]:
    known = [dict(tool) for tool in tools] or None
    ids = renderer.render_ids([dict(each) for each in messages], tools=known, add_generation_prompt=generation)
    return [int(token) for token in ids]


def _agrees(
    renderer: Any, tokenizer: Any, template: TemplateFormat, wanted: dict[int, Any], probes: Sequence[Probe]
) -> bool:
    """Whether renderer and template write the same tokens, or both reject the messages. The template's are kept in
    `wanted`."""
    for number, (messages, tools, generation) in enumerate(probes):
        if number not in wanted:
            wanted[number] = None
            with suppress(ValueError):
                (wanted[number],) = encode(tokenizer, [template.text(messages, tools, generation)], special=False)
        found = None
        with suppress(Exception), one_thread():
            found = _render(renderer, messages, tools, generation)
        if found != (None if wanted[number] is None else list(wanted[number])):
            return False
    return True


def _probes() -> list[Probe]:
    """Conversations in which templates differ."""
    system: Message = {"role": "system", "content": "Be brief.\n\nReally: é, 你好."}
    user: Message = {"role": "user", "content": "What does “word” mean?\nSay it."}
    more: Message = {"role": "user", "content": "And now?"}
    answer: Message = {"role": "assistant", "content": "It means\n\nthis."}
    thought: Message = {**answer, "reasoning_content": "Hm.\nYes."}
    arguments = {"word": 'a "b"', "é": [1, 2.5, None, True]}
    calls = [tool_call("call00000", "look_up", arguments)]
    call: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    result: Message = {"role": "tool", "name": "look_up", "tool_call_id": "call00000", "content": "a\n{“b”: 1}"}
    return [
        ([user], [], True),
        ([system, user], [], True),
        ([user, answer], [], False),
        ([system, user, answer, more], [], True),
        ([user, thought, more], [], True),
        ([user], [PROBE], True),
        ([system, user], [PROBE, PROBE], True),
        ([user, call, result], [PROBE], True),
        ([user, {**call, "content": "Let me see.", "reasoning_content": "Hm."}, result], [PROBE], True),
        ([user, call, result, answer, more], [PROBE], True),
    ]
