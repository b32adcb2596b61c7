"""What the host checks of a step's results before it believes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from atom.errors import BadInput
from atom.model_engine.scheduled_batch import ScheduledRow
from atom.model_engine.step_runner import StepStatus
from atom.model_ops.guard import GuardFault, parse_record


@dataclass(frozen=True)
class JudgedStatus:
    """A status against what its step could give.

    Attributes:
        rejected: rejected drafts of each row, held to what the step computed: lengths index block
            tables on the host.
        faults: what is wrong with a row, by its index.
        drafted, accepted: drafts of the rows that are right.
    """

    rejected: list[int]
    faults: dict[int, str]
    drafted: int
    accepted: int


def judge_status(rows: Sequence[ScheduledRow], status: StepStatus, step: int) -> JudgedStatus:
    """Compare a decode step's status with its rows.

    Args:
        rows: the step's requests.
        status: at least as many counts.
        step: for the texts.
    """
    # the next step waits for this: a step that is right costs no look at a single row
    drafts = [row.query_len - 1 for row in rows]
    bonus = list(status.num_bonus[: len(rows)])
    lost = list(status.num_rejected[: len(rows)])
    if min(bonus, default=0) >= 0 <= min(lost, default=0) and list(map(add, bonus, lost)) == drafts:
        return JudgedStatus(lost, {}, sum(drafts), sum(bonus))
    faults: dict[int, str] = {}
    for index, (most, kept, gone) in enumerate(zip(drafts, bonus, lost, strict=True)):
        if not 0 <= kept <= most or gone != most - kept:
            faults[index] = (
                f"step {step} came back with num_bonus={kept} and num_rejected={gone} for "
                f"{most} drafts, which no step can give: its bytes were written again before "
                "the copy ran, or the host read too early"
            )
    right = [index for index in range(len(rows)) if index not in faults]
    return JudgedStatus(
        [min(max(gone, 0), most) for gone, most in zip(lost, drafts, strict=True)],
        faults,
        sum(drafts[index] for index in right),
        sum(bonus[index] for index in right),
    )


def read_record(words: Sequence[int], max_rows: int) -> GuardFault | None:
    """The guard record that came with a status.

    Raises:
        BadInput: the words are none that a kernel of such an engine writes: stale like the status.
    """
    fault = parse_record(words)
    if fault is not None and not 0 <= fault.row < max_rows:
        raise BadInput(f"guard record: row {fault.row} of {max_rows}: this is not a record")
    return fault


def token_fault(
    ids: Sequence[int], row: ScheduledRow, vocab_size: int | None, bonus: int | None, step: int
) -> str | None:
    """What is wrong with a row's sampled ids, in words; ``None`` if nothing is.

    Args:
        ids: accepted tokens of the row.
        row: its part of the step.
        vocab_size: ids are below it; ``None`` if it is not known.
        bonus: accepted drafts by the row's status; ``None`` if the step sent none.
        step: for the text.
    """
    most = row.query_len if bonus is not None else 1
    wrong = None
    if ids and (min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size)):
        wrong = next(i for i in ids if i < 0 or (vocab_size is not None and i >= vocab_size))
    if wrong is not None:
        what = f"token id {wrong}, and the vocabulary has {vocab_size}"
    elif not 1 <= len(ids) <= most:
        what = f"{len(ids)} tokens, and 1 to {most} are possible"
    elif bonus is not None and len(ids) != bonus + 1:
        what = f"{len(ids)} tokens, and its status counted {bonus} accepted drafts"
    else:
        return None
    return f"step {step} came back with {what}: its bytes were written again before the copy ran"
