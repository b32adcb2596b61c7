"""``pytest -p atom.lifetime.pytest_plugin --lifetime-sanitizer``: every test under the sanitizer.

A test with findings fails, with their text. ``@pytest.mark.lifetime_findings(reason)`` expects
them: such a test fails if there are none. Without the option nothing is watched.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from atom.errors import AtomError
from atom.lifetime.findings import (
    Finding,
    LifetimeFindings,
    Report,
    Suppression,
    read_suppressions,
    unused_suppressions,
)
from atom.lifetime.launcher import device_blindness
from atom.lifetime.sanitizer import Sanitizer

_MARK = "lifetime_findings"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("lifetime")
    group.addoption(
        "--lifetime-sanitizer",
        action="store_true",
        help="fail tests in which device memory is used without an order that protects it",
    )
    group.addoption(
        "--lifetime-suppressions", metavar="FILE", help="lines that do not count, with reasons"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start the watch, if it is asked for."""
    config.addinivalue_line("markers", f"{_MARK}(reason): the sanitizer must find something here")
    if config.getoption("--lifetime-sanitizer"):
        file = config.getoption("--lifetime-suppressions")
        try:
            watch = _Watch(read_suppressions(file) if file else [])
        except AtomError as error:
            raise pytest.UsageError(f"--lifetime-sanitizer: {error}") from None
        config.pluginmanager.register(watch, "lifetime")


class _Watch:
    """One watch for the session, with a report a test."""

    def __init__(self, suppressions: list[Suppression]) -> None:
        self._suppressions = tuple(suppressions)
        self._watch = Sanitizer(suppressions)
        self._watch.start()
        self._blind: list[str] = [
            *self._watch.report.cannot_see,
            *device_blindness(),
            "processes that tests start, forked or not: what is found there fails no test",
        ]
        self._suppressed: list[Finding] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        """A fresh report for the test and its fixtures."""
        self._watch.use(Report(suppressions=self._suppressions))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail the test on findings of its set-up and its call."""
        result = yield
        mark = item.get_closest_marker(_MARK)
        if mark is not None:
            if not self._watch.report.findings:
                raise LifetimeFindings(f"nothing found, but the test is marked {_MARK}{mark.args}")
        else:
            self._raise_if_found()
        self._next()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        """Fail the test on what dies with its fixtures."""
        result = yield
        if item.get_closest_marker(_MARK) is None:
            self._raise_if_found()
        self._next()
        return result

    def _raise_if_found(self) -> None:
        report = self._watch.report
        if report.findings:
            self._next()
            raise LifetimeFindings(report.text())

    def _next(self) -> None:
        report = self._watch.report
        self._suppressed += report.suppressed
        self._blind += [text for text in report.cannot_see if text not in self._blind]
        self._watch.use(Report(suppressions=self._suppressions))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was suppressed and what could not be seen."""
        terminalreporter.section("lifetime sanitizer")
        terminalreporter.write_line(f"{len(self._suppressed)} suppressed")
        for place in unused_suppressions(self._suppressions, self._suppressed):
            terminalreporter.write_line(f"this suppression covered nothing: {place}")
        for text in self._blind:
            terminalreporter.write_line(f"not seen: {text}")

    def pytest_unconfigure(self) -> None:
        """Stop."""
        self._watch.stop()
