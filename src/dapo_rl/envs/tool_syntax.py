"""Reads a turn of the policy: its text, its thoughts and its tool calls.

Markers such as `<tool_call>` that are tokens of their own are recognised by id: the same characters, spelt with other
tokens, are text. Nothing that a model writes raises an exception.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from dapo_rl.base.quote import one_line
from dapo_rl.base.suggest import did_you_mean, nearest
from dapo_rl.base.unicode import is_unicode
from dapo_rl.envs.protocol import ToolCall, Tools
from dapo_rl.errors import UserError

CALL, CALL_END, THINK, THINK_END = "<tool_call>", "</tool_call>", "<think>", "</think>"
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>", "<end_of_turn>")
"""Special tokens that end a turn, beside the tokenizer's own end of sequence."""
OURS = ("hermes", "llama3")
PACKAGED = ("qwen3", "qwen3.5", "glm", "deepseek-v3")
"""Tool formats of the package `renderers`."""
_FAULTS = {
    "unclosed_block": "the tool call has no end",
    "malformed_structure": "the tool call is malformed",
    "unknown_tool": "there is no such tool",
}
"""What its statuses mean."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A turn of the policy."""

    text: str
    """Without tool calls, thoughts and special tokens."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Malformed ones have `error` set."""
    reasoning: str = ""


class _Marker(str):
    """A marker in a turn, as opposed to text."""

    __slots__ = ()


class Syntax(Protocol):
    """How a model writes tool calls."""

    def __call__(self, ids: Sequence[int], tools: Tools) -> Parsed: ...


def end_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that end a turn."""
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = {special[name] for name in END_TOKENS if name in special}
    return frozenset(ends if tokenizer.eos_token_id is None else {*ends, int(tokenizer.eos_token_id)})


def syntax_of(template: str) -> str:
    """The tool format that a chat template writes."""
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek-v3"
    if "<arg_key>" in template:
        return "glm"
    if "<function=" in template and CALL in template:
        return "qwen3.5"
    if CALL not in template and '"parameters": ' in template:
        return "llama3"
    return "hermes"


def tool_syntax(name: str, tokenizer: Any, *, thinks: bool = False, opened: bool = False) -> Syntax:
    """The parser called `name`. `thinks`: the model marks its thoughts; `opened`: the generation prompt begins them."""
    if name == "hermes":
        return Turns(tokenizer, thinks=thinks, opened=opened)
    if name == "llama3":
        return Turns(tokenizer, thinks=thinks, opened=opened, json_only=True)
    if name not in PACKAGED:
        known = (*OURS, *PACKAGED)
        hint = did_you_mean(nearest(name, known), f"choose auto, {', '.join(known)}")
        raise UserError(f"env.tool_format={name}: no such tool format{hint}")
    try:
        from renderers.parsers import get_tool_parser
    except ImportError as error:
        raise UserError(
            f"env.tool_format={name} needs the package renderers ({one_line(error)}): pip install 'dapo-rl[envs]'"
        ) from None
    return Turns(tokenizer, thinks=thinks, opened=opened, extract=get_tool_parser(name, tokenizer).extract)


class Turns:
    """Reads turns with tool calls as `<tool_call>{json}</tool_call>`; `json_only`: as a JSON object alone; or by
    `extract`, a parser of `renderers`."""

    def __init__(
        self, tokenizer: Any, *, thinks: bool, opened: bool, json_only: bool = False, extract: Any = None
    ) -> None:
        self._tokenizer = tokenizer
        self._thinks, self._opened, self._json_only, self._extract = thinks, opened, json_only, extract
        self._ends = end_ids(tokenizer)
        markers = ((THINK, THINK_END) if thinks else ()) + (() if json_only or extract else (CALL, CALL_END))
        added = tokenizer.get_added_vocab()
        self._by_id = {added[marker]: _Marker(marker) for marker in markers if marker in added}
        spelt = [re.escape(marker) for marker in markers if marker not in added]
        self._spelt = re.compile(f"({'|'.join(spelt)})") if spelt else None

    def __call__(self, ids: Sequence[int], tools: Tools) -> Parsed:
        end = next((n for n, token in enumerate(ids) if token in self._ends), len(ids))
        ids = list(ids[:end])
        calls: list[ToolCall] = []
        if self._extract is not None:
            try:
                ids, found = self._extract(ids)
                calls = [packaged_call(each) for each in found]
            except Exception as error:  # what the model wrote is too odd for the parser
                calls = [ToolCall("", error=f"not valid: {one_line(error)}")]
        reasoning, pieces = self._without_thoughts(self._pieces(ids))
        text = "".join(pieces)
        if self._json_only and tools and re.match(r'\s*\{\s*"name"\s*:', text):  # nothing but a JSON object with a name
            text, calls = "", [_with_raw(json_call(text), text)]
        elif not self._json_only and self._extract is None:
            text, calls = _without_calls(pieces)
        return Parsed(text.strip() if calls or reasoning else text, tuple(calls), reasoning)

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        """Texts and markers."""
        pieces: list[str] = []
        run: list[int] = []
        for token in [*ids, None]:
            marker = None if token is None else self._by_id.get(token)
            if token is not None and marker is None:
                run.append(token)
                continue
            text = decoded_text(self._tokenizer, run)
            run = []
            if self._spelt is None:
                pieces.append(text)
            else:  # every second part is a marker
                pieces += (_Marker(part) if n % 2 else part for n, part in enumerate(self._spelt.split(text)))
            if marker is not None:
                pieces.append(marker)
        return [piece for piece in pieces if piece]

    def _without_thoughts(self, pieces: list[str]) -> tuple[str, list[str]]:
        if not self._thinks:
            return "", pieces
        first = next((n for n, piece in enumerate(pieces) if piece.strip()), len(pieces))
        begins = first < len(pieces) and _is(pieces[first], THINK)
        if not begins and not self._opened:
            return "", pieces
        end = next((n for n, piece in enumerate(pieces) if _is(piece, THINK_END)), None)
        rest = [] if end is None else pieces[end + 1 :]
        if end is None:  # a call ends thoughts, too
            end = next((n for n, piece in enumerate(pieces) if _is(piece, CALL)), len(pieces))
            rest = pieces[end:]
        return "".join(pieces[first + 1 if begins else 0 : end]).strip(), rest


def _is(piece: str, marker: str) -> bool:
    return isinstance(piece, _Marker) and piece == marker


def _without_calls(pieces: Sequence[str]) -> tuple[str, list[ToolCall]]:
    texts: list[str] = []
    calls: list[ToolCall] = []
    inside: list[str] | None = None
    for piece in pieces:
        if inside is None and _is(piece, CALL):
            inside = []
        elif inside is not None and _is(piece, CALL_END):
            written = "".join(inside)
            calls.append(_with_raw(json_call(written), f"{CALL}{written}{CALL_END}"))
            inside = None
        else:
            (texts if inside is None else inside).append(piece)
    if inside is not None:
        error = f"the tool call does not end with {CALL_END}"
        calls.append(ToolCall("", error=error, raw=CALL + "".join(inside)))
    return "".join(texts), calls


def _with_raw(call: ToolCall, written: str) -> ToolCall:
    return replace(call, raw=written) if call.error else call


def json_call(text: str) -> ToolCall:
    """The call that a JSON object {"name": …, "arguments": {…}} stands for."""
    try:
        found = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return ToolCall("", error=f"not valid JSON: {one_line(error, 120)}")
    if not isinstance(found, dict):
        return ToolCall("", error="not a JSON object with a name and arguments")
    return checked_call(found.get("name"), found.get("arguments", found.get("parameters", {})))


def checked_call(name: Any, arguments: Any, number: str = "") -> ToolCall:
    """A call with what a model gave as its name and arguments."""
    if not isinstance(name, str) or not name or not is_unicode(name):
        return ToolCall("", id=number, error="the tool call has no name")
    if isinstance(arguments, str):  # as in OpenAI's messages
        try:
            arguments = json.loads(arguments, parse_constant=_no_constant) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            return ToolCall(name, id=number, error=f"not valid JSON: {one_line(error, 120)}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        return ToolCall(name, id=number, error="the arguments are not a JSON object")
    try:
        whole = is_unicode(json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as error:
        return ToolCall(name, id=number, error=f"not valid JSON: {one_line(error, 120)}")
    if not whole:
        return ToolCall(name, id=number, error="not valid JSON: half a surrogate pair is not a character")
    return ToolCall(name, dict(arguments), id=number)


def packaged_call(found: Any) -> ToolCall:
    """The call of a `ParsedToolCall` of `renderers`."""
    return _with_raw(_packaged_call(found), str(found.raw or ""))


def _packaged_call(found: Any) -> ToolCall:
    status, number = str(found.status), str(found.id or "")
    name = found.name if isinstance(found.name, str) else ""
    if status in _FAULTS:
        return ToolCall(name, id=number, error=_FAULTS[status])
    if status == "invalid_json" and not isinstance(found.arguments, Mapping):
        call = json_call(found.raw)
        return ToolCall(name, id=number, error=call.error or "not valid JSON")
    return checked_call(found.name, found.arguments, number)


def decoded_text(tokenizer: Any, ids: Iterable[int]) -> str:
    """The text of tokens, without special ones."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
