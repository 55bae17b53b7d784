"""A process to supervise: `child.py KIND PORT`, where KIND says how it behaves."""

import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


def serve(port: int) -> None:
    HTTPServer(("127.0.0.1", port), Healthy).serve_forever()


def main() -> None:
    kind, port = sys.argv[1], int(sys.argv[2])
    if kind == "crash":
        print("INFO starting", flush=True)
        print("Traceback (most recent call last):", flush=True)
        print("ValueError: block size 7 is odd", flush=True)
        print("RuntimeError: engine core initialization failed", flush=True)
        sys.exit(3)
    if kind == "never-ready":
        threading.Event().wait()
    if kind == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if kind == "parent":
        # The grandchild ignores SIGTERM and outlives its parent.
        subprocess.Popen([sys.executable, __file__, "stubborn", str(port + 1)])
    serve(port)


if __name__ == "__main__":
    main()
