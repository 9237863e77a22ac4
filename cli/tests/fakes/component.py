"""A fake component. Its arguments are actions, executed in order:

say TEXT      print it
wait          wait for SIGTERM, then exit 0
beat          touch RLJOB_HEARTBEAT once
chatter       print lines until killed
ignore        from now on ignore SIGTERM
child         start a copy of this in a session of its own, which waits
titled        like child, but without an environment in /proc, as after setproctitle
once FILE CODE  create FILE and exit with CODE, unless FILE exists
exit CODE     exit
coordinator FILE   answer /v1/status at RLJOB_LISTEN with the contents of FILE. A POST to /v1/suspend with the
                   operator's token sets its state to Suspended; on SIGTERM such a status is written to status.json
slow          from now on answer each GET later than the interval of status polls
make PATH     create a directory with a minimal valid model
"""

import contextlib
import http.server
import json
import os
import pathlib
import signal
import subprocess
import sys
import time


class Status(http.server.BaseHTTPRequestHandler):
    delay = 0.0

    def do_GET(self):
        time.sleep(self.delay)
        body = pathlib.Path(sys.argv[-1]).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        tokens = json.loads(pathlib.Path(os.environ["RLJOB_TOKENS"]).read_text())
        right = self.path == "/v1/suspend" and self.headers["Authorization"] == f"Bearer {tokens['owner']}"
        if right:
            say("told to suspend")
            file = pathlib.Path(sys.argv[-1])
            file.write_text(json.dumps(json.loads(file.read_text()) | {"state": "Suspended"}))
        self.send_response(202 if right else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def leave_status(*_):
    storage = pathlib.Path(os.environ["RLJOB_STORAGE"])
    status = pathlib.Path(sys.argv[-1]).read_bytes()
    if b'"Suspended"' in status:
        (storage / "status.json").write_bytes(status)
    os._exit(0)


def main(acts):
    while acts:
        act = acts.pop(0)
        if act == "say":
            say(acts.pop(0))
        elif act == "wait":
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            say("waiting")
            while True:
                signal.pause()
        elif act == "chatter":
            while True:
                say("x" * 100)
        elif act == "beat":
            pathlib.Path(os.environ["RLJOB_HEARTBEAT"]).touch()
        elif act == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say("ignoring")
            while True:
                signal.pause()
        elif act == "child":
            subprocess.Popen([sys.executable, "-I", "-S", __file__, *(acts or ["wait"])], start_new_session=True)
        elif act == "titled":
            command = [sys.executable, "-I", "-S", __file__, "wait"]
            subprocess.Popen(command, start_new_session=True, env={})
        elif act == "once":
            marker, code = pathlib.Path(acts.pop(0)), int(acts.pop(0))
            if not marker.exists():
                marker.touch()
                sys.exit(code)
        elif act == "make":
            model = pathlib.Path(acts.pop(0))
            model.mkdir(parents=True)
            (model / "config.json").write_text('{"model_type": "fake"}')
            (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        elif act == "exit":
            sys.exit(int(acts.pop(0)))
        elif act == "slow":
            Status.delay = 0.1
        elif act == "coordinator":
            host, _, port = os.environ["RLJOB_LISTEN"].rpartition(":")
            signal.signal(signal.SIGTERM, leave_status)
            with contextlib.closing(http.server.ThreadingHTTPServer((host, int(port)), Status)) as server:
                server.serve_forever()


main(sys.argv[1:])
