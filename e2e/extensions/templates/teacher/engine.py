"""An engine of a frozen pool. An answer says what it was asked: max_tokens, temperature, the end of the message.

python -m teacher.engine PORT
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import aiohttp

from rljob.rollout.adapters.base import Launch

KEY = "TEACHER_KEY"


class Teacher:
    """The adapter of one pool."""

    in_flight = ("keep",)

    def __init__(self, pool, model):
        pass

    def problems(self):
        yield from ()

    def launch(self, port, key):
        raise NotImplementedError

    def launch_frozen(self, port, key):
        return Launch([sys.executable, "-m", "teacher.engine", str(port)], {KEY: key})

    def connect(self, port, key):
        return Client(f"http://127.0.0.1:{port}")

    def find_error(self, lines):
        return [*lines, ""][-1]


class Client:
    def __init__(self, url):
        self.url = url

    async def healthy(self):
        try:
            async with aiohttp.ClientSession() as session, session.get(self.url) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def close(self):
        pass


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = self.headers["Authorization"] == f"Bearer {os.environ[KEY]}" and body["model"] == "teacher"
        text = f"{body['max_tokens']} {body['temperature']} {body['messages'][-1]['content'][-5:]}"
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        self.send_response(200 if known else 400)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice]}).encode())

    def log_message(self, *arguments):
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
