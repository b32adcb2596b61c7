"""Host-side checks that caught the fault, off by default, and a parser for their lines.

Two kinds of line, as the source's debug build wrote them::

    [L1DBG-MTP-STATUS] num_bonus=[...] prev_batch.req_ids=[...]
    [L1DBG-GDN-OOB] bad_nat_rows=[...] row=I req=R nat=N num_bonus_sched=B state_slots[I]=[...]

A list may end in ``...`` where its writer left values out.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from atom.errors import BadInput

_LOGGER = logging.getLogger(__name__)

STATUS_MARK = "[L1DBG-MTP-STATUS]"
OUT_OF_BOUNDS_MARK = "[L1DBG-GDN-OOB]"


@dataclass(frozen=True)
class DebugList:
    """A list of a debug line.

    Attributes:
        values: the values shown.
        elided: whether ``...`` follows them.
    """

    values: tuple[int, ...]
    elided: bool = False

    def __str__(self) -> str:
        shown = [str(value) for value in self.values] + ["..."] * self.elided
        return f"[{', '.join(shown)}]"

    @classmethod
    def head(cls, values: Sequence[int], shown: int | None) -> DebugList:
        """The first ``shown`` values (``None``: all)."""
        kept = tuple(int(value) for value in (values if shown is None else values[:shown]))
        return cls(kept, len(kept) < len(values))


@dataclass(frozen=True)
class MtpStatusLine:
    """A received status with a bonus outside 0..draft_tokens.

    Attributes:
        num_bonus: bonus of each request.
        req_ids: the batch that the status belongs to.
    """

    num_bonus: DebugList
    req_ids: DebugList

    def __str__(self) -> str:
        return f"{STATUS_MARK} num_bonus={self.num_bonus} prev_batch.req_ids={self.req_ids}"


@dataclass(frozen=True)
class GdnOutOfBoundsLine:
    """A ``num_accepted_tokens`` outside 1..draft_tokens+1 on its way to the conv-state kernel.

    Attributes:
        bad_rows: rows of the batch with such a value.
        row: the row that the other fields describe.
        req: its request.
        num_accepted_tokens: its value.
        num_bonus: the bonus that the scheduler holds for it.
        state_slots: its state slots.
    """

    bad_rows: DebugList
    row: int
    req: int
    num_accepted_tokens: int
    num_bonus: int
    state_slots: DebugList

    def __str__(self) -> str:
        return (
            f"{OUT_OF_BOUNDS_MARK} bad_nat_rows={self.bad_rows} row={self.row} req={self.req} "
            f"nat={self.num_accepted_tokens} num_bonus_sched={self.num_bonus} "
            f"state_slots[{self.row}]={self.state_slots}"
        )


DebugLine = MtpStatusLine | GdnOutOfBoundsLine


class DebugChecks:
    """The two checks. Each returns the line that it logged, or ``None``.

    Args:
        draft_tokens: draft tokens a step.
        enabled: off by default: the checks read every value on the host.
        shown: most values of a list in a line; ``None`` shows all.
    """

    def __init__(
        self, draft_tokens: int, *, enabled: bool = False, shown: int | None = None
    ) -> None:
        self.draft_tokens = draft_tokens
        self.enabled = enabled
        self.shown = shown

    def check_status(
        self, num_bonus: Tensor | Sequence[int], req_ids: Sequence[int]
    ) -> MtpStatusLine | None:
        """Check a received status.

        Args:
            num_bonus: ``[batch]`` on the host.
            req_ids: the requests of the batch that was sampled.
        """
        if not self.enabled:
            return None
        values = _as_ints(num_bonus)
        if all(0 <= value <= self.draft_tokens for value in values):
            return None
        line = MtpStatusLine(
            DebugList.head(values, self.shown), DebugList.head(req_ids, self.shown)
        )
        _LOGGER.error("%s", line)
        return line

    def check_accepted(
        self,
        num_accepted_tokens: Tensor | Sequence[int],
        req_ids: Sequence[int],
        num_bonus: Tensor | Sequence[int],
        state_slots: Sequence[Sequence[int]],
    ) -> GdnOutOfBoundsLine | None:
        """Check what the conv-state kernel is about to index with; describe the first bad row.

        Args:
            num_accepted_tokens: ``[batch]`` on the host.
            req_ids: the batch's requests.
            num_bonus: ``[batch]``, the scheduler's bonus of each.
            state_slots: the state slots of each.
        """
        if not self.enabled:
            return None
        values = _as_ints(num_accepted_tokens)
        most = self.draft_tokens + 1
        bad = [row for row, value in enumerate(values) if not 1 <= value <= most]
        if not bad:
            return None
        row = bad[0]
        line = GdnOutOfBoundsLine(
            DebugList.head(bad, self.shown),
            row,
            int(req_ids[row]),
            values[row],
            int(num_bonus[row]),
            DebugList.head(state_slots[row], self.shown),
        )
        _LOGGER.error("%s", line)
        return line


def _as_ints(values: Tensor | Sequence[int]) -> list[int]:
    return [int(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]


class _Cursor:
    """Reads a line from left to right; an error names the column and what belongs there."""

    _INTEGER = re.compile(r"-?[0-9]+")

    def __init__(self, line: str, at: int) -> None:
        self.line = line
        self.at = at

    def fail(self, expected: str) -> BadInput:
        found = self.line[self.at : self.at + 24]
        return BadInput(
            f"malformed debug line, column {self.at + 1}: expected {expected}, found "
            f"{found + '...' if len(self.line) > self.at + 24 else found!r}: {self.line!r}"
        )

    def take(self, text: str) -> None:
        if not self.line.startswith(text, self.at):
            raise self.fail(repr(text))
        self.at += len(text)

    def name(self, text: str) -> None:
        """Blanks, then ``text``."""
        start = self.at
        while self.line[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        if self.at == start:
            raise self.fail("a blank")
        self.take(text)

    def integer(self, what: str) -> int:
        match = self._INTEGER.match(self.line, self.at)
        if match is None:
            raise self.fail(f"an integer ({what})")
        self.at = match.end()
        return int(match.group())

    def list(self, what: str) -> DebugList:
        self.take("[")
        values: list[int] = []
        if self.line.startswith("]", self.at):
            self.at += 1
            return DebugList(())
        while True:
            if self.line.startswith("...]", self.at):
                self.at += 4
                return DebugList(tuple(values), elided=True)
            values.append(self.integer(what))
            if self.line.startswith("]", self.at):
                self.at += 1
                return DebugList(tuple(values))
            self.take(",")
            while self.line.startswith(" ", self.at):
                self.at += 1

    def end(self) -> None:
        if self.line[self.at :].strip():
            raise self.fail("the end of the line")


def parse_debug_line(line: str) -> DebugLine:
    """The record of a debug line. A logger's prefix before the mark is allowed.

    Raises:
        BadInput: it has no mark, or its text is malformed; names the column.
    """
    line = line.rstrip("\r\n")
    for mark, parse in ((STATUS_MARK, _parse_status), (OUT_OF_BOUNDS_MARK, _parse_out_of_bounds)):
        at = line.find(mark)
        if at >= 0:
            cursor = _Cursor(line, at + len(mark))
            record = parse(cursor)
            cursor.end()
            return record
    raise BadInput(f"no debug line: neither {STATUS_MARK} nor {OUT_OF_BOUNDS_MARK} in {line!r}")


def _parse_status(cursor: _Cursor) -> DebugLine:
    cursor.name("num_bonus=")
    num_bonus = cursor.list("num_bonus")
    cursor.name("prev_batch.req_ids=")
    return MtpStatusLine(num_bonus, cursor.list("prev_batch.req_ids"))


def _parse_out_of_bounds(cursor: _Cursor) -> DebugLine:
    cursor.name("bad_nat_rows=")
    bad_rows = cursor.list("bad_nat_rows")
    values = []
    for name in ("row", "req", "nat", "num_bonus_sched"):
        cursor.name(f"{name}=")
        values.append(cursor.integer(name))
    row, req, accepted, bonus = values
    # the line repeats its row; one that does not agree with itself is damaged
    cursor.name(f"state_slots[{row}]=")
    return GdnOutOfBoundsLine(bad_rows, row, req, accepted, bonus, cursor.list("state_slots"))
