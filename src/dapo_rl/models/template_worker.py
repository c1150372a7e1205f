"""The process that renders chat templates. A template is code of the model: it may double a string without end.

This file runs as a script and imports nothing of the package. A request is a line of JSON on standard input with one
template and many conversations, and the answer a line on standard output for each of them.
"""

import json
import math
import os
import resource
import select
import sys
import time
from typing import Any

MEMORY_BYTES, CPU_SECONDS, LONGEST_TEXT = (int(word) for word in sys.argv[1:4]) if len(sys.argv) == 4 else (0, 0, 0)
"""Limits on a template, from the command line; the memory is that beyond what the process has at its start."""
ORPHANED_SECONDS = 5.0
"""How often the process looks whether the one that started it has ended."""


def _answer(template: str, messages: list[Any], names: dict[str, Any], render: Any) -> dict[str, str]:
    used = math.ceil(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_SECONDS, resource.RLIM_INFINITY))
    try:
        (text,), _ = render(conversations=[messages], chat_template=template, **names)
    except MemoryError:
        return {"problem": f"it needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except Exception as error:
        return {"problem": str(error) or type(error).__name__}
    if len(text) > LONGEST_TEXT:
        return {"problem": f"it writes a text of {len(text):,} characters"}
    try:
        text.encode()
    except UnicodeEncodeError:
        return {"problem": "it writes text that is not valid Unicode"}
    return {"text": text}


def main() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    parent = os.getppid()
    most = _address_space() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests = sys.stdin.buffer
    while _comes(requests, parent) and (line := requests.readline()):
        request = json.loads(line)
        for messages, options in request["conversations"]:
            found = _answer(request["template"], messages, {**request["names"], **options}, render_jinja_template)
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()


def _address_space() -> int:
    """Libraries reserve much of it, on machines with many cores most."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        return 0


def _comes(requests: Any, parent: int) -> bool:
    """Waits for a request. Another child of the parent may hold the pipe open when the parent has ended."""
    while not select.select([requests], [], [], ORPHANED_SECONDS)[0]:
        if os.getppid() != parent:
            return False
    return True


if __name__ == "__main__":
    main()
