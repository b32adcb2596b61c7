"""Accepted verdicts of each profile, and what counts as worse than them."""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from atom.errors import BadInput
from atom.evidence import Evidence
from atom.workbook.claim_model import Claim, load_claims
from atom.workbook.tables import DATA, shown_path, write_atomically
from atom.workbook.verdicts import Settled, Verdict

VERDICTS = DATA / "verdicts"

#: a higher rank is worse; findings against the source are handled on their own
_RANK = {
    Verdict.REPRODUCED: 0,
    Verdict.REPRODUCED_IN_SIMULATION: 0,
    Verdict.INCONCLUSIVE: 1,
    Verdict.NOT_TESTABLE_HERE: 2,
    Verdict.NOT_RUN: 3,
    Verdict.DIFFERS: 4,
    Verdict.SOURCE_INCONSISTENT: 4,
}
_AGAINST = (Verdict.DIFFERS, Verdict.SOURCE_INCONSISTENT)
#: verdicts that somebody should look at even where nothing was accepted before
_DOUBTFUL = (*_AGAINST, Verdict.INCONCLUSIVE)


class Accepted(BaseModel):
    """A verdict that somebody looked at, and why it is right."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    verdict: Verdict
    reason: str = Field(min_length=1)
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")


_FILE = TypeAdapter(dict[str, Accepted])


def _file(profile: str) -> Path:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", profile):
        raise BadInput(f"profile {profile!r}: lower-case letters, digits, '.', '_' and '-' only")
    return VERDICTS / f"{profile}.json"


def load_accepted(profile: str) -> dict[str, Accepted]:
    """Accepted verdicts by ``<claim>/<evidence>``; empty for a profile that has none yet.

    Raises:
        BadInput: the file is damaged; names each place.
    """
    file = _file(profile)
    if not file.exists():
        return {}
    try:
        return _FILE.validate_json(file.read_bytes())
    except ValidationError as error:
        lines = (
            f"{shown_path(file)}:{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
            for fault in error.errors()
        )
        raise BadInput("\n".join(lines)) from None


def _fell(now: Verdict, before: Verdict, evidence: Evidence) -> bool:
    if now is before:
        return False
    # arithmetic has no noise: any change means that a table or a formula changed
    if evidence is Evidence.ARITHMETIC or Verdict.SOURCE_INCONSISTENT in (now, before):
        return True
    # a difference that turns into "could not tell" is a finding lost
    if before is Verdict.DIFFERS:
        return _RANK[now] > 0
    return _RANK[now] > _RANK[before]


def compare(
    settled: Iterable[Settled], accepted: Mapping[str, Accepted], notebook: str
) -> list[str]:
    """What fell, one line each; empty means that nothing did.

    A verdict falls if it is worse than the accepted one, if it is of arithmetic or
    ``source inconsistent`` and changed at all, or if it stands against the source (``differs``,
    ``source inconsistent``) and nobody accepted it. An accepted verdict of this notebook falls if
    the notebook no longer settles it.

    Args:
        settled: verdicts of one run of the notebook.
        accepted: from :func:`load_accepted`.
        notebook: its number, ``"00"`` to ``"07"``.
    """
    claims = load_claims()
    now = {one.key: one for one in settled}
    fallen = []
    for key, one in now.items():
        found = f"{one.value} ({one.detail})" if one.value else one.detail
        before = accepted.get(key)
        if before is None:
            if one.verdict in _AGAINST:
                fallen.append(f"{key}: '{one.verdict}' was never accepted: {found}")
        elif _fell(one.verdict, before.verdict, one.evidence):
            fallen.append(f"{key}: '{one.verdict}', accepted was '{before.verdict}': {found}")
    for key, before in accepted.items():
        if key in now or before.verdict is Verdict.NOT_RUN:
            continue
        home = _home(key, claims)
        if home is None:
            fallen.append(f"{key}: accepted as '{before.verdict}', but there is no such claim")
        elif home == notebook:
            fallen.append(f"{key}: accepted as '{before.verdict}', but no longer settled")
    return fallen


def _home(key: str, claims: Mapping[str, Claim]) -> str | None:
    name, _, kind = key.partition("/")
    claim = claims.get(name)
    if claim is None or kind not in claim.evidence:
        return None
    return claim.notebook_for(Evidence(kind))


def _needs_decision(one: Settled, before: Accepted | None) -> bool:
    if before is None:
        return one.verdict in _DOUBTFUL
    if one.verdict is before.verdict:
        return False
    return one.verdict in _DOUBTFUL or _fell(one.verdict, before.verdict, one.evidence)


def accept(profile: str, key_or_glob: str, reason: str, settled: Iterable[Settled]) -> list[str]:
    """Accept present verdicts, and write the profile's file.

    A claim's id alone stands for those of its verdicts that need a decision: worse than what is
    accepted, or against the source or inconclusive and not accepted as that. One reason seldom
    fits both a measurement that differs and a simulation that does not. A full key or a pattern
    accepts exactly what it matches.

    Args:
        profile: e.g. ``ci`` or ``h200``.
        key_or_glob: ``<claim>/<evidence>``, a claim id, or a pattern of either. A full key that
            was accepted once and is settled no more is withdrawn.
        reason: why the verdicts are right; kept beside them.
        settled: all verdicts of the profile's last run.

    Returns:
        The keys that changed.

    Raises:
        BadInput: no reason, nothing matches, or no verdict of the claim needs a decision.
    """
    if not reason.strip():
        raise BadInput("accepting a verdict needs a reason")
    now = {one.key: one for one in settled}
    bare = re.fullmatch(r"[^/*?\[]+", key_or_glob) is not None
    pattern = key_or_glob if "/" in key_or_glob else f"{key_or_glob}/*"
    accepted = load_accepted(profile)
    changed = [key for key in now if fnmatch.fnmatchcase(key, pattern)]
    if bare and changed:
        found = ", ".join(f"{key} '{now[key].verdict}'" for key in changed)
        changed = [key for key in changed if _needs_decision(now[key], accepted.get(key))]
        if not changed:
            raise BadInput(
                f"no verdict of {key_or_glob} needs acceptance by profile {profile}: {found}; to "
                f"accept one anyway name it in full, all of them with '{key_or_glob}/*'"
            )
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    for key in changed:
        accepted[key] = Accepted(verdict=now[key].verdict, reason=reason.strip(), date=today)
    if not changed and key_or_glob in accepted:
        del accepted[key_or_glob]
        changed = [key_or_glob]
    if not changed:
        near = difflib.get_close_matches(key_or_glob, [*now, *(one.claim for one in now.values())])
        hint = f"; did you mean {' or '.join(sorted(set(near)))}?" if near else ""
        raise BadInput(f"no verdict of profile {profile} matches {key_or_glob!r}{hint}")
    content = {key: accepted[key].model_dump(mode="json") for key in sorted(accepted)}
    file = _file(profile)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    return changed
