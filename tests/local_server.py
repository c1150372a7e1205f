"""A real HTTP server on this host, for tests of clients."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LocalServer:
    """A subclass says what it answers."""

    def __init__(self):
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self._answer(None)

            def do_POST(self):
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body):
                status, headers, data = server.respond(self.path, body, dict(self.headers))
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

    def respond(self, path, body, headers):
        """The status, headers and bytes of the answer; `body` is None for a GET."""
        raise NotImplementedError

    @contextmanager
    def running(self):
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield self
        finally:
            self._http.shutdown()
            self._http.server_close()
