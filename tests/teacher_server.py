"""A real HTTP server around a model that answers as vLLM's does: /v1/models, /tokenize and /v1/completions with
prompt_logprobs."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

CONTEXT = 512


class TeacherServer:
    """`before` gets the path and the body, and returns None, or (status, bytes) in place of the answer."""

    def __init__(self, model, tokenizer, before=lambda path, body: None):
        self.model, self.tokenizer, self.before = model, tokenizer, before
        self.asked, self.headers = [], []
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._answer(None)

            def do_POST(self):
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body):
                with server._lock:
                    server.asked.append((self.path, body))
                    server.headers.append(dict(self.headers))
                    status, data = server.before(self.path, body) or (200, None)
                    if data is None:
                        data = json.dumps(server.answer(self.path, body)).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
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
    def completions(self):
        """The bodies of requests for completions."""
        return [body for path, body in self.asked if path == "/v1/completions"]

    def answer(self, path, body):
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "teacher", "max_model_len": CONTEXT}, {"id": "lora"}]}
        if path == "/tokenize":
            ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"]).input_ids
            return {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids}
        choices = [self._choice(i, row, body["prompt_logprobs"]) for i, row in enumerate(body["prompt"])]
        return {"object": "text_completion", "model": body["model"], "choices": choices[::-1]}

    @torch.no_grad()
    def _choice(self, index, row, top):
        logps = self.model(torch.tensor([row])).logits[0].float().log_softmax(-1)
        positions = [None]
        for token, of_next in zip(row[1:], logps, strict=False):
            best = of_next.topk(top).indices.tolist() if top else []
            positions.append(
                {
                    str(each): {"logprob": of_next[each].item(), "rank": 1, "decoded_token": "?"}
                    for each in {token, *best}
                }
            )
        return {"index": index, "text": "?", "finish_reason": "length", "prompt_logprobs": positions}

    def start(self):
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        self._http.shutdown()
        self._http.server_close()


@contextmanager
def teacher_server(model, tokenizer, before=lambda path, body: None):
    server = TeacherServer(model, tokenizer, before)
    server.start()
    try:
        yield server
    finally:
        server.stop()
