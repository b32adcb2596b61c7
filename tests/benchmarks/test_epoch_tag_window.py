"""The tags alone, under every schedule of the unprotected protocol, and the order that fails."""

from __future__ import annotations

import pytest

from atom.benchmarks.lifetime_check import _Tally
from atom.benchmarks.lifetime_mutations import Change, changed
from atom.benchmarks.lifetime_paths import LifetimePath
from atom.benchmarks.lifetime_programs import Following, LifetimeProgram
from atom.config import CopyProtocol
from atom.lifetime.explore import explore
from atom.transfer.copy_protocol import CopyStrategy

BEHIND_ALONE = Change(CopyStrategy, "new_payload", "if opened:", "if False:")
# clean() waits under every protocol
SINGLE = [path for path in LifetimePath if path is not LifetimePath.CLEAN]


def tally(path: LifetimePath, following: Following, depth: int = 1) -> _Tally:
    found = _Tally(LifetimeProgram(path, CopyProtocol.UNPATCHED, depth, following))
    assert explore(found).complete
    return found


@pytest.mark.parametrize("following", Following)
@pytest.mark.parametrize("path", SINGLE)
def test_no_schedule_brings_foreign_bytes_past_the_tags(
    path: LifetimePath, following: Following
) -> None:
    found = tally(path, following)
    assert found.foreign > 0
    assert found.tag == found.foreign


@pytest.mark.parametrize("path", [LifetimePath.SPEC_STATUS, LifetimePath.ELL_ONE_OFF])
def test_nor_with_two_steps_in_flight(path: LifetimePath) -> None:
    found = tally(path, Following.PAYLOAD, 2)
    assert found.tag == found.foreign > 0


@pytest.mark.parametrize("path", SINGLE)
def test_tags_written_behind_the_data_alone_let_some_pass(path: LifetimePath) -> None:
    with changed((BEHIND_ALONE,)):
        found = tally(path, Following.PAYLOAD)
    assert 0 < found.tag < found.foreign
