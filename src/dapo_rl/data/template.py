"""Renders chat templates in a separate process, with limited memory and time.

It is a fresh process rather than a worker of `dapo_rl.workers`: templates are rendered after the model is loaded, when
the run has threads and perhaps a GPU, and cannot fork.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parents[1] / "models" / "template_worker.py"
MEMORY_BYTES, CPU_SECONDS, LONGEST_TEXT = 1 << 30, 5, 64 << 20
"""Limits on a template."""
PLAIN = "transformers.tokenization_utils_base"
"""The module of the method that renders the template as text."""


Conversation = tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]
"""Messages, and the arguments of the template."""


class TemplateError(ValueError):
    """Why a template gives no text."""


def render(tokenizer: Any, conversations: Sequence[Conversation]) -> Iterator[str | Exception]:
    """`tokenizer.apply_chat_template` of each conversation, without tokenizing, or why there is no text: a
    TemplateError if the template fails or takes too much. A tokenizer that overrides the method, which is the
    user's code, raises its own errors."""
    own = getattr(type(tokenizer), "apply_chat_template", None)
    if getattr(own, "__module__", None) == PLAIN:
        try:
            template = tokenizer.get_chat_template()
        except ValueError as error:  # it has several, none of which is the default
            yield from [error] * len(conversations)
            return
        yield from _renderer.render(template, tokenizer.special_tokens_map, conversations)
        return
    for messages, options in conversations:
        try:
            conversation = [dict(message) for message in messages]
            yield str(tokenizer.apply_chat_template(conversation, tokenize=False, **options))
        except Exception as error:
            yield error


class _Renderer:
    """The process, which is started when it is needed and again after a template has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(
        self, template: str, names: Mapping[str, Any], conversations: Sequence[Conversation]
    ) -> Iterator[str | TemplateError]:
        """One request renders many conversations. Those after one that ends the process are requested again."""
        done = 0
        while done < len(conversations):
            left = [([dict(message) for message in messages], options) for messages, options in conversations[done:]]
            request = {"template": template, "names": dict(names), "conversations": left}
            answers = self._answers(json.dumps(request, default=str).encode() + b"\n", len(left))
            done += len(answers)
            yield from answers

    def _answers(self, request: bytes, count: int) -> list[str | TemplateError]:
        """As many as the process gives before it ends; the last one says why it did."""
        answers: list[str | TemplateError] = []
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                with suppress(BrokenPipeError):
                    process.stdin.write(request)
                    process.stdin.flush()
                while len(answers) < count and (line := process.stdout.readline()).endswith(b"\n"):
                    found = json.loads(line)
                    answers.append(TemplateError(found["problem"]) if "problem" in found else str(found["text"]))
                if len(answers) < count:
                    answers.append(TemplateError(self._why_ended(process)))
            except BaseException:
                self.close()  # the answers left in the pipe belong to this request
                raise
        return answers

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():  # a forked process must not share the pipes
            limits = map(str, (MEMORY_BYTES, CPU_SECONDS, LONGEST_TEXT))
            command = [sys.executable, "-P", str(WORKER), *limits]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )  # in its own session, because Ctrl-C is for the run
            self._owner = os.getpid()
        return self._process

    def _why_ended(self, process: subprocess.Popen[bytes]) -> str:
        self._process = None
        code = process.wait()
        if code == -signal.SIGXCPU:
            return f"it takes more than {CPU_SECONDS} seconds"
        return f"the process that renders it ended with exit code {code}"

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()


_renderer = _Renderer()
atexit.register(_renderer.close)
