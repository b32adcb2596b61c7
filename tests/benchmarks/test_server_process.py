"""Servers from a template: started, awaited, watched and ended, whatever becomes of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from atom.benchmarks.server_ports import PortLease, _is_free
from atom.benchmarks.server_process import Server, ServerFailed
from atom.benchmarks.server_template import ServerTemplate
from atom.benchmarks.throughput_rows import Outcome
from atom.errors import BadInput

FAKE = Path(__file__).with_name("fake_server.py")


def template(mode: str = "ok", after: int = 0) -> ServerTemplate:
    return ServerTemplate(
        f"{sys.executable} -S {FAKE} --port {{port}} --pool {{pool_gib}} "
        f"--concurrency {{concurrency}} --mode '{mode}' --after {after}"
    )


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "server.log"


def serve(mode: str, log: Path, after: int = 0) -> Server:
    return Server(template(mode, after), pool_gib=1.5, concurrency=4, log=log)


def ask(server: Server, timeout: float = 5.0) -> str:
    body = json.dumps({"prompt": list(range(20)), "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{server.base_url}/v1/completions", data=body)
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return str(answer.read().decode())


# -- the template
def test_words_are_filled_in_and_no_shell_sees_them() -> None:
    made = ServerTemplate(
        "env A=1 serve --port={port} --json '{{\"a\": {pool_gib}}}' --n {concurrency} 'a b'"
    )
    words = made.command(port=80, pool_gib=1.25, concurrency=3)
    assert words == ["env", "A=1", "serve", "--port=80", "--json", '{"a": 1.25}', "--n", "3", "a b"]
    assert made.command(port=80, pool_gib=None, concurrency=3)[5] == '{"a": 0}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a command line"),
        ("serve {port} {pool_gib} 'a", "No closing quotation"),
        ("serve {port} {pool_gib} {gpu}", r"unknown placeholder \{gpu\}"),
        ("serve {port:d} {pool_gib}", r"unknown placeholder \{port:d\}"),
        ("serve {port} {pool_gib} {", r"write \{\{ and \}\}"),
        ("serve {pool_gib}", r"\{port\} is missing"),
        ("serve {port}", r"\{pool_gib\} is missing"),
    ],
)
def test_what_is_wrong_with_a_template_is_said(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        ServerTemplate(text)


def test_a_program_that_is_not_here_is_named(log: Path) -> None:
    made = ServerTemplate("no-such-server-at-all {port} {pool_gib}")
    with pytest.raises(BadInput, match="no program 'no-such-server-at-all'"):
        made.check_program()
    with pytest.raises(ServerFailed, match="did not start") as caught:
        Server(made, pool_gib=1, concurrency=1, log=log)
    assert caught.value.outcome is Outcome.START_FAILED


# -- ports
def test_no_two_leases_share_a_port() -> None:
    """The same first choice each time: the second has to go on."""
    leases = [PortLease(seed=5) for _ in range(3)]
    assert len({lease.port for lease in leases}) == 3
    code = "from atom.benchmarks.server_ports import PortLease; print(PortLease(seed=5).port)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert int(other.stdout) not in {lease.port for lease in leases}
    first = leases[0].port
    leases[0].release()
    assert PortLease(seed=5).port == first
    for lease in leases[1:]:
        lease.release()


# -- a life
def test_a_server_is_started_awaited_and_ended(log: Path) -> None:
    with serve("ok", log, after=10) as server:
        assert server.wait_until_ready(20) == server.ready_seconds
        assert "'pool': 1.5, 'concurrency': 4" in log.read_text()
        assert '"cached_tokens"' in ask(server)
        server.check()
        assert server.verdict() == (Outcome.OK, None)
        port = server.port
    assert server.exit_code == -signal.SIGTERM
    assert _is_free(port)
    with pytest.raises(urllib.error.URLError):
        ask(server)


def test_one_without_health_is_asked_for_its_models(log: Path) -> None:
    with serve("no health", log) as server:
        server.wait_until_ready(20)
        assert server.verdict() == (Outcome.OK, None)


def test_two_at_once_have_a_port_and_a_pool_of_their_own(tmp_path: Path) -> None:
    with serve("ok", tmp_path / "a", 9) as one, serve("ok", tmp_path / "b", 9) as other:
        one.wait_until_ready(20)
        other.wait_until_ready(20)
        assert one.port != other.port
        assert '"cached_tokens": 0' in ask(one)
        assert '"cached_tokens": 20' in ask(one)
        assert '"cached_tokens": 0' in ask(other)
        one.end()
        # the other is not touched
        assert other.verdict() == (Outcome.OK, None)


@pytest.mark.parametrize(
    ("mode", "outcome", "words"),
    [
        ("bad start", Outcome.START_FAILED, "code 3: no such model"),
        ("no room", Outcome.OUT_OF_MEMORY, "code 1: cannot pin: out of memory"),
        ("never", Outcome.START_FAILED, "did not answer within 1 s"),
    ],
)
def test_one_that_does_not_come_up_says_why(
    log: Path, mode: str, outcome: Outcome, words: str
) -> None:
    with serve(mode, log) as server, pytest.raises(ServerFailed, match=words) as caught:
        server.wait_until_ready(1 if mode == "never" else 20)
    assert caught.value.outcome is outcome


@pytest.mark.parametrize(
    ("mode", "outcome", "words", "code"),
    [
        ("crash", Outcome.CRASH, "SIGABRT: Fatal: an illegal memory", -signal.SIGABRT),
        ("exit", Outcome.CRASH, "ended with code 7", 7),
        ("out of memory", Outcome.OUT_OF_MEMORY, "code 1: torch.OutOfMemoryError", 1),
        ("guard", Outcome.GUARD_ERROR, "log says: batch row 3", -signal.SIGTERM),
        ("engine dead", Outcome.CRASH, "log says: EngineDeadError", -signal.SIGTERM),
        ("hang", Outcome.HANG, "did not answer within 0.3 s", -signal.SIGTERM),
    ],
)
def test_how_it_ends_is_an_outcome(
    log: Path, mode: str, outcome: Outcome, words: str, code: int
) -> None:
    with serve(mode, log) as server:
        server.wait_until_ready(20)
        assert server.verdict() == (Outcome.OK, None)
        if mode == "hang":
            with pytest.raises(OSError, match="timed out"):
                ask(server, 0.2)
        else:
            try:
                ask(server)
            except OSError:
                assert code != -signal.SIGTERM
        found, detail = server.verdict(patience=0.3)
        assert found is outcome
        assert re.search(words, detail or "")
        if mode != "hang":
            with pytest.raises(ServerFailed):
                server.check()
    assert server.exit_code == code


def children(log: Path) -> list[int]:
    found = re.search(r"children (\d+) (\d+)", log.read_text())
    assert found
    return [int(number) for number in found.groups()]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_what_a_server_has_started_ends_with_it(log: Path) -> None:
    with serve("child", log) as server:
        server.wait_until_ready(20)
        pids = children(log)
        assert all(is_running(pid) for pid in pids)
    assert gone(pids)


@pytest.fixture
def owner(log: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has a server and does not get to end it."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from atom.benchmarks.server_process import Server\n"
        "from atom.benchmarks.server_template import ServerTemplate\n"
        f"server = Server(ServerTemplate({template().text!r}), pool_gib=1, concurrency=1, "
        f"log=Path({str(log)!r}))\n"
        "server.wait_until_ready(20)\n"
        "print(server._process.pid, server._keeper.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process
    process.kill()
    process.wait()


def test_nothing_is_left_when_its_owner_is_killed(owner: subprocess.Popen[str]) -> None:
    assert owner.stdout is not None
    pids = [int(word) for word in owner.stdout.readline().split()]
    assert len(pids) == 2
    assert all(is_running(pid) for pid in pids)
    # as a sweep kills a point: the server is not in its group
    os.killpg(owner.pid, signal.SIGKILL)
    owner.wait()
    assert gone(pids)


def test_a_stranger_on_the_port_is_not_taken_for_the_server(log: Path) -> None:
    """The port is taken between its choice and the server's start: another's answers count not."""
    with serve("ok", log) as stranger:
        stranger.wait_until_ready(20)
        with Server(template("never"), pool_gib=1, concurrency=1, log=log) as late:
            late.port = stranger.port
            assert late.answers()
            with pytest.raises(ServerFailed, match="did not answer"):
                late.wait_until_ready(1)
