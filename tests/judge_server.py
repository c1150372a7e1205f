"""A real HTTP server that answers as an OpenAI-compatible one does."""

import json
from collections import Counter

from local_server import LocalServer

TOKENS = 10
"""Of each call, as the server reports them."""


class JudgeServer(LocalServer):
    """`reply` gets the prompt and returns the text, or (status, headers), or (status, headers, body)."""

    def __init__(self, reply):
        self.reply = reply
        self.asked = []
        self.bodies = []
        self.headers = []
        super().__init__()

    def respond(self, path, body, headers):
        prompt = body["messages"][0]["content"]
        with self.lock:
            self.asked.append(prompt)
            self.bodies.append((path, body))
            self.headers.append(headers)
        said = self.reply(prompt)
        if isinstance(said, tuple):
            return (*said, b"")[:3]
        message = {"role": "assistant", "content": said}
        return 200, {}, json.dumps({"choices": [{"message": message}], "usage": {"total_tokens": TOKENS}}).encode()

    @property
    def twice(self):
        """Prompts that were asked more than once."""
        return [prompt for prompt, count in Counter(self.asked).items() if count > 1]


def judge_server(reply):
    return JudgeServer(reply).running()


def write_judge(path, url, **changes):
    """A judge file; a value of None leaves a key out."""
    judge = {
        "endpoint": url,
        "model": "small",
        "prompt": "Question: {prompt}\nResponse: {response}\nGrade:",
        "parse": r"grade (\S+)",
        "retries": 0,
        "timeout_s": 5,
    } | changes
    path.write_text(json.dumps({k: v for k, v in judge.items() if v is not None}), encoding="utf-8")
    return path
