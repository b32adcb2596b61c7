"""Starts one OpenAI-compatible server from a template, awaits it, watches it and ends it.

The server is whatever a command line starts: ATOM's, vLLM's, SGLang's, llama.cpp's. It runs in a
session and a process group of its own, with its output in a log. How it ended is an outcome, read
from its exit code and its log.

A small keeper ends the group if this process dies first, however it dies.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Self

import psutil

from atom.benchmarks.server_ports import PortLease
from atom.benchmarks.server_template import ServerTemplate
from atom.benchmarks.throughput_process import exit_text
from atom.benchmarks.throughput_rows import Outcome
from atom.errors import AtomError

_HOST = "127.0.0.1"
_POLL_SECONDS = 0.1
#: a server that dies is given so long to be seen dead
_DEATH_SECONDS = 2.0
_KEEPER = (
    "import os, signal, sys\n"
    "sys.stdin.read()\n"
    "try: os.killpg(int(sys.argv[1]), signal.SIGKILL)\n"
    "except ProcessLookupError: pass\n"
)
_TAIL_BYTES = 2**20
#: what a log says of an end, first match first; a server may live on after the engine in it died
_SIGNS: tuple[tuple[Outcome, re.Pattern[str]], ...] = (
    (
        Outcome.GUARD_ERROR,
        re.compile(r"has num_accepted_tokens -?\d+|state was neither read nor written"),
    ),
    (
        Outcome.OUT_OF_MEMORY,
        re.compile(
            r"out of memory|OutOfMemory|MemoryError|bad_alloc|failed to allocate|"
            r"unable to allocate|No available memory for the cache blocks",
            re.I,
        ),
    ),
    (
        Outcome.CRASH,
        re.compile(
            r"illegal memory access|illegal address|Memory access fault|HSA_STATUS_ERROR|"
            r"device-side assert|misaligned address|EngineDeadError|EngineCore.*(died|failed)|"
            r"engine (loop )?died|Segmentation fault|core dumped|SIGABRT|SIGSEGV",
            re.I,
        ),
    ),
)


class ServerFailed(AtomError):
    """A server did not come up, or ended by itself.

    Attributes:
        outcome: how.
        code: exit code of its process; ``None`` if it lived.
    """

    def __init__(self, outcome: Outcome, detail: str, code: int | None) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.code = code


class Server:
    """A running server. Use it as a context manager: it is ended on the way out.

    Args:
        template: starts it.
        pool_gib: its CPU pool; ``None``: no offload.
        concurrency: live sessions that it will get.
        log: its output goes there, standard output and error together.
        environment: variables to set beside this process's.

    Attributes:
        port: where it listens.
        ready_seconds: from its start until it answered; ``None`` before.
    """

    def __init__(
        self,
        template: ServerTemplate,
        *,
        pool_gib: float | None,
        concurrency: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        self.ready_seconds: float | None = None
        #: where in the log its service begins: what came before says nothing of its end
        self._served_from = 0
        #: the log up to here shows nothing wrong
        self._clear_to = 0
        self._lease = PortLease()
        self.port = self._lease.port
        command = template.command(port=self.port, pool_gib=pool_gib, concurrency=concurrency)
        log.parent.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(environment or {})},
                    start_new_session=True,
                )
        except OSError as error:
            self._lease.release()
            detail = f"the server's program did not start: {error.strerror}"
            raise ServerFailed(Outcome.START_FAILED, detail, None) from None
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        """See the class."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.end()

    @property
    def base_url(self) -> str:
        """Where clients find it."""
        return f"http://{_HOST}:{self.port}"

    @property
    def exit_code(self) -> int | None:
        """Of its process; ``None`` while it runs. Negative: by that signal."""
        return self._process.poll()

    def wait_until_ready(self, seconds: float) -> float:
        """Wait until it answers ``/health`` or ``/v1/models`` on its own port.

        Args:
            seconds: longest wait.

        Returns:
            Seconds from its start.

        Raises:
            ServerFailed: it ended, or did not answer in time.
        """
        while (spent := time.monotonic() - self._began) < seconds:
            if self.exit_code is not None:
                raise self._failure(Outcome.START_FAILED)
            # the port may have been taken by somebody else, who answers too
            if self.answers(min(2.0, seconds - spent)) and self._listens():
                self.ready_seconds = time.monotonic() - self._began
                self._served_from = self.log.stat().st_size
                return self.ready_seconds
            time.sleep(_POLL_SECONDS)
        words = self.last_words()
        detail = f"the server did not answer within {seconds:g} s{f': {words}' if words else ''}"
        raise ServerFailed(Outcome.START_FAILED, detail, None)

    def answers(self, seconds: float = 5.0) -> bool:
        """Whether it answers a request for its health, or for its models, within ``seconds``."""
        for path in ("/health", "/v1/models"):
            connection = HTTPConnection(_HOST, self.port, timeout=seconds)
            try:
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return True
            except (OSError, HTTPException):
                return False
            finally:
                connection.close()
        return False

    def _listens(self) -> bool:
        for process in self._family():
            try:
                found = process.net_connections(kind="tcp")
            except psutil.NoSuchProcess:
                continue
            except psutil.AccessDenied:
                # then nobody can tell
                return True
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == self.port for c in found):
                return True
        return False

    def _family(self) -> list[psutil.Process]:
        try:
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def check(self) -> None:
        """Note whether it still serves. Waits for nothing.

        Raises:
            ServerFailed: it has ended, or its log says that its engine has.
        """
        if self.exit_code is not None:
            raise self._failure(Outcome.CRASH)
        start = max(self._clear_to, self._served_from)
        with self.log.open("rb") as file:
            file.seek(start)
            fresh = file.read()
        found = _sign(fresh.decode(errors="replace").splitlines())
        if found is not None:
            outcome, line = found
            raise ServerFailed(outcome, f"its log says: {line}", None)
        # what was looked at is not looked at again, but for a line that is not whole yet
        self._clear_to = start + fresh.rfind(b"\n") + 1

    def verdict(self, *, patience: float = 5.0) -> tuple[Outcome, str | None]:
        """How it stands after a load, before :meth:`end`.

        Args:
            patience: longest time for it to answer a request for its health.

        Returns:
            ``ok``, or what became of it and why.
        """
        try:
            # what broke its connections a moment ago may be its death
            if not self.answers(patience):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_DEATH_SECONDS)
                self.check()
                return Outcome.HANG, f"the server did not answer within {patience:g} s"
            self.check()
        except ServerFailed as failure:
            return failure.outcome, str(failure)
        return Outcome.OK, None

    def end(self, patience: float = 10.0) -> int:
        """End it and all that it has started.

        Args:
            patience: seconds to end by itself after the first signal.

        Returns:
            Its exit code. One that ended by itself keeps its own.
        """
        family = self._family()
        try:
            if self._process.poll() is None:
                self._signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience)
            # its group, and what has left the group
            self._signal(signal.SIGKILL)
            for process in family[1:]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            return self._process.wait()
        finally:
            self._keeper.kill()
            self._keeper.wait()
            if self._keeper.stdin is not None:
                self._keeper.stdin.close()
            self._lease.release()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    # -- what its log says
    def _failure(self, otherwise: Outcome) -> ServerFailed:
        """It ended by itself."""
        code = self._process.returncode
        found = _sign(self._tail())
        detail = f"the server ended by itself: {exit_text(code)}"
        if found is not None:
            # before it served, only a lack of memory is no plain failure to start
            early = otherwise is Outcome.START_FAILED and found[0] is not Outcome.OUT_OF_MEMORY
            return ServerFailed(otherwise if early else found[0], f"{detail}: {found[1]}", code)
        words = self.last_words()
        return ServerFailed(otherwise, f"{detail}{f': {words}' if words else ''}", code)

    def last_words(self) -> str:
        """The last line of its log that says something, of bounded length."""
        return next((_short(line) for line in reversed(self._tail()) if line.strip()), "")

    def _tail(self) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(self._served_from, file.tell() - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()


def _sign(lines: Sequence[str]) -> tuple[Outcome, str] | None:
    for outcome, pattern in _SIGNS:
        for line in lines:
            if pattern.search(line):
                return outcome, _short(line)
    return None


def _short(line: str) -> str:
    return line.strip()[:300]
