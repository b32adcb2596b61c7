"""What the sanitizer found: findings, suppressions with reasons, and the report.

A finding names the missing edge of the three that a transfer needs: (a) the producer before the
copy, (b) the copy before the host's read, (c) the copy before the source's bytes are written again.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from atom.errors import AtomError, BadInput


class Edge(StrEnum):
    """Which order is missing."""

    PRODUCER = "a"  #: the producer before the reader
    HOST_READ = "b"  #: the copy before the host's read
    REUSE = "c"  #: the reader before the bytes are written again


class Kind(StrEnum):
    """How the missing order was seen."""

    FREED_IN_USE = "freed-in-use"  #: a block died while another stream may still use it
    REUSE_RACE = "reuse-race"  #: the next owner touches bytes that the last owner's work may use
    LIVE_OVERWRITE = "live-overwrite"  #: live bytes are written while another stream may read them
    UNORDERED_WRITES = "unordered-writes"  #: two streams write the same live bytes in no order
    READ_TOO_EARLY = "read-too-early"  #: a stream reads what another stream may not have written
    HOST_READ_TOO_EARLY = "host-read-too-early"  #: the host reads a pinned target too early
    HOST_WRITE_TOO_EARLY = "host-write-too-early"  #: the host writes a pinned buffer too early


class LifetimeFindings(AtomError):
    """The sanitizer found missing orders."""

    exit_code = 1


@dataclass(frozen=True)
class Site:
    """A place in the program: the nearest Python line and its callers, nearest first."""

    file: str = ""
    line: int = 0
    function: str = ""
    callers: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        if not self.file:
            return "a place outside Python"
        return f"{shown(self.file)}:{self.line} in {self.function}"

    def lines(self) -> list[tuple[str, int]]:
        """All lines: the nearest, then its callers."""
        return [(self.file, self.line), *self.callers] if self.file else []


def shown(file: str) -> str:
    """``file`` relative to the working folder where it lies below it."""
    try:
        relative = os.path.relpath(file)
    except (ValueError, OSError):
        return file
    return file if relative.startswith("..") else relative


@dataclass(frozen=True)
class Use:
    """One party of a finding: an operation, where it was called, and on which stream.

    ``tensor`` is ``dtype[shape]``; ``nbytes`` is what it reaches over.
    """

    operation: str
    stream: str
    site: Site
    tensor: str = ""
    nbytes: int = 0

    def __str__(self) -> str:
        what = f" of {self.tensor} ({self.nbytes} bytes)" if self.tensor else ""
        return f"{self.operation}{what} on {self.stream} at {self.site}"


@dataclass
class Finding:
    """A missing order.

    Attributes:
        edge: which of (a), (b), (c).
        kind: how it was seen.
        first: the earlier use, whose end nothing waits for (the copy, in the classic fault).
        second: the later use, where there is one (the reuse, or the host's read).
        freed: where the last reference was dropped.
        owner: where the block was allocated, and its stream.
        next_owner: where the bytes were allocated again.
        block_bytes: the block, rounded as the allocator rounds.
        fix: the smallest change that closes it.
        count: how often the same lines were seen.
        process: its process id.
        suppressed: the reason for which it does not count.
    """

    edge: Edge
    kind: Kind
    first: Use
    second: Use | None = None
    freed: Site | None = None
    owner: Use | None = None
    next_owner: Use | None = None
    block_bytes: int = 0
    fix: str = ""
    count: int = 1
    process: int = field(default_factory=os.getpid)
    suppressed: str = ""

    def key(self) -> tuple[Any, ...]:
        """Equal for findings of the same lines."""
        freed = self.freed and (self.freed.file, self.freed.line)
        second = self.second and self.kind is not Kind.FREED_IN_USE and self.second.site.lines()[:1]
        return (self.kind, tuple(self.first.site.lines()[:1]), freed, tuple(second or ()))

    def sites(self) -> list[tuple[str, int]]:
        """Every line that the finding names."""
        uses = [self.first, self.second, self.owner, self.next_owner]
        lines = [line for use in uses if use is not None for line in use.site.lines()]
        return lines + (self.freed.lines() if self.freed else [])

    def text(self) -> str:
        """The finding in words, several lines."""
        labels = {
            Edge.PRODUCER: "(a) the producer before its reader",
            Edge.HOST_READ: "(b) the copy before the host's read",
            Edge.REUSE: "(c) the earlier use before the bytes are written again",
        }
        lines = [f"{self.kind}: missing edge {labels[self.edge]}"]
        lines.append(f"  first:  {self.first}")
        if self.owner is not None:
            lines.append(f"  owner:  allocated at {self.owner.site}, {self.owner.stream}")
        if self.freed is not None:
            size = f" (a block of {self.block_bytes} bytes)" if self.block_bytes else ""
            lines.append(f"  freed:  at {self.freed}{size}")
        if self.next_owner is not None:
            lines.append(f"  reused: allocated at {self.next_owner.site}, {self.next_owner.stream}")
        if self.second is not None:
            lines.append(f"  second: {self.second}")
        for name, site in (("first", self.first.site), ("freed", self.freed)):
            for file, line in site.callers if site else ():
                lines.append(f"    {name} was called from {shown(file)}:{line}")
        lines.append(f"  fix:    {self.fix}")
        if self.count > 1:
            lines.append(f"  seen {self.count} times")
        if self.suppressed:
            lines.append(f"  suppressed: {self.suppressed}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Finding:
        """The finding of :meth:`as_json`."""
        known = dict(values)
        for name in ("first", "second", "owner", "next_owner"):
            if known.get(name):
                known[name] = Use(**{**known[name], "site": _site(known[name]["site"])})
        if known.get("freed"):
            known["freed"] = _site(known["freed"])
        known["edge"], known["kind"] = Edge(known["edge"]), Kind(known["kind"])
        return cls(**known)


def _site(values: dict[str, Any]) -> Site:
    callers = tuple((str(file), int(line)) for file, line in values["callers"])
    return Site(values["file"], values["line"], values["function"], callers)


@dataclass(frozen=True)
class Suppression:
    """Findings that name this line do not count.

    Attributes:
        file: end of the file's path, or a pattern with ``*``.
        line: the line, or ``None`` for the whole file.
        reason: why it is right; never empty.

    Raises:
        BadInput: no file or no reason.
    """

    file: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"

    def __post_init__(self) -> None:
        if not self.file.strip() or not self.reason.strip():
            raise BadInput(
                f"suppression {str(self)!r}: a file and a reason are needed, e.g. "
                "'loader.py:120  the ring is deeper than the pipeline'"
            )

    def matches(self, finding: Finding) -> bool:
        """Whether the finding names the line."""
        return any(
            (self.line is None or line == self.line) and self._is_file(file)
            for file, line in finding.sites()
        )

    def _is_file(self, file: str) -> bool:
        path = file.replace(os.sep, "/")
        if "*" in self.file:
            return fnmatch.fnmatch(path, self.file) or fnmatch.fnmatch(path, "*/" + self.file)
        return path == self.file or path.endswith("/" + self.file.lstrip("/"))


def read_suppressions(path: str | Path) -> list[Suppression]:
    """Suppressions of a text file: ``FILE[:LINE]  REASON`` a line; ``#`` starts a comment.

    Raises:
        BadInput: the file is missing, or a line has no reason; names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadInput(f"suppressions {path}: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split(None, 1)
        if not words or words[0].startswith("#"):
            continue
        file, _, place = words[0].rpartition(":")
        if not file or not place.isdigit():
            file, place = words[0], ""
        if len(words) < 2:
            raise BadInput(f"{path}:{number}: {words[0]!r} has no reason; write one behind it")
        found.append(Suppression(file, int(place) if place else None, words[1].strip()))
    return found


def unused_suppressions(
    suppressions: Iterable[Suppression], suppressed: Collection[Finding]
) -> list[str]:
    """Those that covered nothing: a line that has moved, or one that was mistyped.

    Args:
        suppressions: that were given.
        suppressed: all findings that any of them covered.
    """
    return [str(one) for one in suppressions if not any(one.matches(each) for each in suppressed)]


@dataclass
class Report:
    """Everything that one run of the sanitizer found, children included.

    Attributes:
        findings: those that count, one for each set of lines.
        suppressed: those that a suppression covers.
        cannot_see: what this run was blind to, in words.
        operations: device operations seen.
        processes: processes that reported.
    """

    suppressions: Sequence[Suppression] = ()
    findings: list[Finding] = field(default_factory=list)
    suppressed: list[Finding] = field(default_factory=list)
    cannot_see: list[str] = field(default_factory=list)
    operations: int = 0
    processes: int = 1
    #: called with each finding that is new or has learnt more
    on_change: Callable[[Finding], None] | None = None
    _by_key: dict[tuple[Any, ...], Finding] = field(default_factory=dict, repr=False)

    def add(self, finding: Finding) -> Finding:
        """Add a finding, or count it with the one of the same lines, which is returned."""
        key = finding.key()
        known = self._by_key.get(key)
        if known is not None:
            known.count += finding.count
            return known
        self._by_key[key] = finding
        for suppression in self.suppressions:
            if suppression.matches(finding):
                finding.suppressed = suppression.reason
                self.suppressed.append(finding)
                break
        else:
            self.findings.append(finding)
        self.changed(finding)
        return finding

    def changed(self, finding: Finding) -> None:
        """Say that a finding has learnt more."""
        if self.on_change is not None:
            self.on_change(finding)

    def note(self, text: str) -> None:
        """Say what cannot be seen, once."""
        if text not in self.cannot_see:
            self.cannot_see.append(text)

    def merge(self, findings: Iterable[Finding], notes: Iterable[str], operations: int) -> None:
        """Add what a child process found."""
        for finding in findings:
            finding.suppressed = ""
            self.add(finding)
        for text in notes:
            self.note(text)
        self.operations += operations
        self.processes += 1

    @property
    def exit_code(self) -> int:
        """1 with findings that count, else 0."""
        return 1 if self.findings else 0

    def text(self) -> str:
        """The report in words."""
        count = len(self.findings)
        lines = [
            f"lifetime sanitizer: {count} finding{'' if count == 1 else 's'}, "
            f"{len(self.suppressed)} suppressed, {self.operations} device operations, "
            f"{self.processes} process{'' if self.processes == 1 else 'es'}"
        ]
        for number, finding in enumerate([*self.findings, *self.suppressed], 1):
            lines += ["", f"[{number}] {finding.text()}"]
        unused = unused_suppressions(self.suppressions, self.suppressed)
        if unused:
            lines += ["", "suppressions that covered nothing:", *(f"  - {one}" for one in unused)]
        if self.cannot_see:
            lines += ["", "not seen in this run:", *(f"  - {text}" for text in self.cannot_see)]
        return "\n".join(lines)

    def as_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(
            {
                "findings": [finding.as_json() for finding in self.findings],
                "suppressed": [finding.as_json() for finding in self.suppressed],
                "unused_suppressions": unused_suppressions(self.suppressions, self.suppressed),
                "cannot_see": self.cannot_see,
                "operations": self.operations,
                "processes": self.processes,
            },
            indent=1,
        )

    def raise_if_found(self) -> None:
        """Raise with the report's text if there are findings that count.

        Raises:
            LifetimeFindings: there are.
        """
        if self.findings:
            raise LifetimeFindings(self.text())
