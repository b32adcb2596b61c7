"""A tiny server with OpenAI's completions interface that can be told how to end."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--pool", type=float, required=True)
parser.add_argument("--concurrency", type=int, default=0)
parser.add_argument("--mode", default="ok")
parser.add_argument("--after", type=int, default=3, help="requests until it does what it is told")
parser.add_argument("--step", type=float, default=0.001, help="seconds a token")
options = parser.parse_args()

#: prompts that were seen, as many as the pool has place for
SEEN: OrderedDict[tuple[int, ...], None] = OrderedDict()
LOCK = threading.Lock()
COUNT = 0


def say(text: str) -> None:
    print(text, flush=True)


def cached(prompt: list[int]) -> int:
    """Longest common beginning with a remembered prompt, in whole tens; remembers this one."""
    most = 0
    for seen in SEEN:
        same = 0
        for left, right in zip(seen, prompt, strict=False):
            if left != right:
                break
            same += 1
        most = max(most, same)
    SEEN[tuple(prompt)] = None
    while len(SEEN) > options.pool * 1000:
        SEEN.popitem(last=False)
    return most // 10 * 10


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if options.mode == "hang" and options.after < COUNT:
            time.sleep(60)
        known = {"/v1/models"} if options.mode == "no health" else {"/health", "/v1/models"}
        simulated = json.dumps(options.mode == "simulated").encode()
        body = b'{"data": [{"id": "fake", "simulated": %s}]}' % simulated
        self.send_response(200 if self.path in known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        global COUNT
        if not self.path.endswith("completions"):
            known = options.mode == "can reset" and self.path.startswith("/reset_prefix_cache?")
            if known:
                SEEN.clear()
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with LOCK:
            COUNT += 1
            number = COUNT
            hit = cached(asked["prompt"])
        if number > options.after:
            end()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        # what is not cached has to be computed
        time.sleep((len(asked["prompt"]) - hit) * options.step / 20)
        for token in range(asked["max_tokens"]):
            time.sleep(options.step)
            last = token == asked["max_tokens"] - 1
            choice = {"index": 0, "text": "x", "finish_reason": "length" if last else None}
            self.event({"choices": [choice]})
        usage = {
            "prompt_tokens": len(asked["prompt"]),
            "completion_tokens": asked["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": hit},
        }
        self.event({"choices": [], "usage": usage})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, values: dict[str, Any]) -> None:
        self.chunk(b"data: " + json.dumps(values).encode() + b"\n\n")

    def chunk(self, content: bytes) -> None:
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()


def end() -> None:
    """What the mode says becomes of it."""
    match options.mode:
        case "crash":
            say("Fatal: an illegal memory access was encountered")
            os.abort()
        case "exit":
            os._exit(7)
        case "out of memory":
            say("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
            os._exit(1)
        case "guard":
            # it lives on, as a server whose engine has ended does
            say("batch row 3 (state slot 5) has num_accepted_tokens 9; 1 to 4 are possible")
        case "engine dead":
            say("EngineDeadError: EngineCore encountered an issue")
        case "hang":
            time.sleep(60)


if options.mode == "never":
    time.sleep(60)
if options.mode == "bad start":
    say("no such model")
    sys.exit(3)
if options.mode == "no room":
    say("cannot pin: out of memory")
    sys.exit(1)
if options.mode == "child":
    # a worker in a session of its own
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    away = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    say(f"children {child.pid} {away.pid}")
# words of a healthy start that must not be taken for its end
say(f"started, out of memory is no option: {vars(options)}")
ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
