"""Renders chat templates in a process of their own, with limited memory and time."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parents[1] / "models" / "template_worker.py"
MEMORY_BYTES, CPU_SECONDS, LONGEST_TEXT = 1 << 30, 5, 64 << 20
"""Limits on a template."""
PLAIN = "transformers.tokenization_utils_base"
"""The module of the method that renders the template as text."""


class TemplateError(ValueError):
    """Why a template gives no text."""


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """`tokenizer.apply_chat_template` without tokenizing. Raises TemplateError if the template fails or takes too much;
    a tokenizer with a method of its own, which is the user's code, raises its own errors."""
    conversation = [dict(message) for message in messages]
    own = getattr(type(tokenizer), "apply_chat_template", None)
    if getattr(own, "__module__", None) != PLAIN:
        return str(tokenizer.apply_chat_template(conversation, tokenize=False, **options))
    template = tokenizer.get_chat_template()
    names = {**tokenizer.special_tokens_map, **options}
    return _renderer.render({"template": template, "messages": conversation, "options": names})


class _Renderer:
    """The process, which is started when it is needed and again after a template has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(self, request: Mapping[str, Any]) -> str:
        line = json.dumps(request, default=str).encode() + b"\n"
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
                answer = process.stdout.readline()
            except OSError:
                answer = b""
            if not answer.endswith(b"\n"):
                raise TemplateError(self._why_ended(process))
        found = json.loads(answer)
        if "problem" in found:
            raise TemplateError(found["problem"])
        return str(found["text"])

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():  # a forked process must not share the pipes
            limits = map(str, (MEMORY_BYTES, CPU_SECONDS, LONGEST_TEXT))
            command = [sys.executable, "-P", str(WORKER), *limits]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
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
