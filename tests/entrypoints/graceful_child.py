"""Serves the stand-in for the engine until a signal comes; run by ``test_graceful.py``."""

from __future__ import annotations

import os
import sys

from fake_engine import LONGEST, MODEL, FakeEngine

from atom.entrypoints.api import ServedModel, Server
from atom.entrypoints.graceful import GracefulServer
from atom.entrypoints.serve import bind
from atom.entrypoints.tokenizer import ByteTokenizer


def main() -> None:
    patience = float(sys.argv[1])
    engine = FakeEngine(step_seconds=0.002)
    server = Server(engine, ServedModel(MODEL, ByteTokenizer(256), 256, LONGEST, True))
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        web = GracefulServer(server, patience, lambda: print(port, flush=True))
        web.run(sockets=[listener])
    if web.force_exit:
        os._exit(130)
    assert engine.closed
    assert not engine.has_unfinished_requests()


if __name__ == "__main__":
    main()
