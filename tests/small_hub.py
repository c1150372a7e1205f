"""A server that speaks enough of the hub's API for an upload."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import constants


class SmallHub:
    """Repositories in memory; every file goes into its commit, none to large-file storage."""

    def __init__(self, status=200):
        self.status = status
        self.created, self.commits = [], []

    def answer(self, path, body):
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return {"url": f"{self.address}/someone/{self.created[-1]['name']}"}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        assert "/commit/" in path, path
        header, *operations = [json.loads(line) for line in body.splitlines()]
        files = {o["value"]["path"]: base64.b64decode(o["value"]["content"]) for o in operations}
        self.commits.append((path, header["value"]["summary"], files))
        return {"commitUrl": f"{self.address}/someone/model/commit/0123", "commitOid": "0123", "success": True}

    @contextmanager
    def serving(self):
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.send_response(200)
                self.end_headers()

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"] or 0))
                assert self.headers["Authorization"] == "Bearer hf_secret"
                refused = {"error": "You may not write here"}
                answer = json.dumps(hub.answer(self.path, body) if hub.status == 200 else refused).encode()
                self.send_response(hub.status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *words):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


def use_hub(monkeypatch, address, token="hf_secret"):
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
