"""A real HTTP server that answers as an OpenAI-compatible one does."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKENS = 10
"""Of each call, as the server reports them."""


class JudgeServer:
    """`reply` gets the prompt and returns the text, or (status, headers), or (status, headers, body)."""

    def __init__(self, reply):
        self.reply = reply
        self.asked = []
        self.bodies = []
        self.headers = []
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = body["messages"][0]["content"]
                with server._lock:
                    server.asked.append(prompt)
                    server.bodies.append((self.path, body))
                    server.headers.append(dict(self.headers))
                said = server.reply(prompt)
                status, headers, data = 200, {}, None
                if isinstance(said, tuple):
                    status, headers, data = (*said, b"")[:3]
                else:
                    message = {"role": "assistant", "content": said}
                    data = json.dumps({"choices": [{"message": message}], "usage": {"total_tokens": TOKENS}}).encode()
                try:
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(data)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # the client has gone

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @property
    def twice(self):
        """Prompts that were asked more than once."""
        return [prompt for prompt, count in Counter(self.asked).items() if count > 1]

    def start(self):
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        self._http.shutdown()
        self._http.server_close()


@contextmanager
def judge_server(reply):
    server = JudgeServer(reply)
    server.start()
    try:
        yield server
    finally:
        server.stop()


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
