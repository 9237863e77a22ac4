"""A part for tests, told by its arguments what to do: some words are acts, done in order.

say TEXT      print it
wait          wait for SIGTERM, then exit 0
ignore        from now on ignore SIGTERM
child         start a copy of this in a session of its own, which waits
once FILE CODE  exit with CODE unless FILE exists, then make FILE
exit CODE     exit
coordinator FILE   answer /v1/status at RLJOB_LISTEN with the contents of FILE
make PATH     make a directory
"""

import contextlib
import http.server
import os
import pathlib
import signal
import subprocess
import sys


class Status(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = pathlib.Path(sys.argv[-1]).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


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
        elif act == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say("ignoring")
            while True:
                signal.pause()
        elif act == "child":
            subprocess.Popen([sys.executable, "-I", "-S", __file__, "wait"], start_new_session=True)
        elif act == "once":
            marker, code = pathlib.Path(acts.pop(0)), int(acts.pop(0))
            if not marker.exists():
                marker.touch()
                sys.exit(code)
        elif act == "make":
            pathlib.Path(acts.pop(0)).mkdir(parents=True)
        elif act == "exit":
            sys.exit(int(acts.pop(0)))
        elif act == "coordinator":
            host, _, port = os.environ["RLJOB_LISTEN"].rpartition(":")
            with contextlib.closing(http.server.ThreadingHTTPServer((host, int(port)), Status)) as server:
                server.serve_forever()


main(sys.argv[1:])
