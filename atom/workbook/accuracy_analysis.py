"""What recorded accuracy points say: scores, acceptance, and answers item by item."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from atom.benchmarks.accuracy_settings import HOLD, TWIN, UNPATCHED
from atom.benchmarks.gsm8k_task import TaskSettings, load_items
from atom.benchmarks.seeded_model import SEEDED
from atom.evidence import Evidence
from atom.workbook.records import Run
from atom.workbook.statistics import exact_interval, mcnemar_exact, wilson_interval

NOTHING = "–"
#: order of arms in tables and figures
_ARMS = (HOLD, TWIN, "record_stream", "zero_copy", UNPATCHED)
#: most answers of the reference that were cut short, for scores to mean something
_MOST_CUT = 0.05
#: columns of stale payloads
STALE = ("stale_statuses", "stale_tokens", "stale_drafts")


@dataclass(frozen=True)
class ChangedItems:
    """Two points, item by item.

    Attributes:
        compared: items that both answered.
        changed: of those, the ones with another answer.
        failed: items that the second did not answer.
        lost, gained: items right in the first alone, in the second alone; a failed one is not
            right.
        items: of the points.
    """

    compared: int
    changed: int
    failed: int
    lost: int
    gained: int
    items: int

    @property
    def p(self) -> float:
        """Of McNemar's exact test that the two are right equally often."""
        return mcnemar_exact(self.lost, self.gained)

    @property
    def damaged(self) -> int:
        """Items with another answer, or none."""
        return self.changed + self.failed


@dataclass(frozen=True)
class PointResult:
    """One point's figures beside the reference's.

    Attributes:
        row: of table ``points``, with ``None`` where it is blank.
        score: strict-match with its Wilson interval; ``None`` where the point did not end.
        acceptance: accepted of verified drafts; ``None`` without.
        against: item by item with the reference; ``None`` for the reference itself, or without.
    """

    row: dict[str, Any]
    score: tuple[float, float, float] | None
    acceptance: float | None
    against: ChangedItems | None

    @property
    def name(self) -> str:
        """The point's identity."""
        return str(self.row["point_id"])

    @property
    def mean_length(self) -> float | None:
        """Mean tokens a request and decode step."""
        drafts = self.row["draft_tokens"]
        return None if self.acceptance is None else 1 + drafts * self.acceptance

    @property
    def stale(self) -> int | None:
        """Payloads with another step's tag."""
        counts = [self.row[name] for name in STALE]
        return None if any(count is None for count in counts) else int(sum(counts))

    @property
    def pressure(self) -> tuple[float, float]:
        """MiB of a store, and the share of steps that have one."""
        mib = float(self.row["pressure_mib"] or 0)
        return mib, 1 / (self.row["pressure_every"] or 1) if mib else 0.0

    @property
    def pressure_text(self) -> str:
        """In words."""
        every = self.row["pressure_every"]
        steps = "each step" if every == 1 else f"every {every} steps"
        return f"{self.pressure[0]:g} MiB ahead of {steps}"


@dataclass(frozen=True)
class AccuracySet:
    """Points of one run.

    Attributes:
        kind: of evidence.
        source: machine or profile, in words.
        run: where they come from.
        points: in the order of their plan.
    """

    kind: Evidence
    source: str
    run: Run
    points: tuple[PointResult, ...]

    @property
    def run_ids(self) -> list[str]:
        """For captions."""
        return [self.run.provenance.run_id]

    @property
    def model(self) -> str:
        """What was asked."""
        return str(self.points[0].row["model"]) if self.points else NOTHING

    @property
    def is_noise(self) -> bool:
        """Whether the model's weights are random: then no score means anything."""
        return self.model == SEEDED

    @cached_property
    def has_scores(self) -> bool:
        """Whether scores mean something: of a trained model whose answers had room to end."""
        if self.is_noise:
            return False
        items, most = self.run.tables["items"], self.run.provenance.settings.get("max_tokens")
        name = reference_point(self.run.tables["points"])
        if name is None or most is None:
            return True
        lengths = items.loc[items["point_id"] == name, "output_tokens"].astype(float)
        return float((lengths >= most).mean()) <= _MOST_CUT

    @property
    def damage_words(self) -> str:
        """What :meth:`damaged` counts."""
        return "right answers lost" if self.has_scores else "answers changed or missing"

    def damaged(self, point: PointResult) -> int | None:
        """Damaged items of a point: right ones that it lost, where scores mean something.

        Rounding chooses between equally good words, and so changes answers, but loses none. Where
        no answer is right, a changed one or none is counted; ``None`` without a reference.
        """
        if point.against is None:
            return None
        return point.against.lost if self.has_scores else point.against.damaged

    def damage(self, point: PointResult) -> tuple[float, float, float] | None:
        """Share of damaged items, with its exact interval."""
        count = self.damaged(point)
        if count is None or point.against is None:
            return None
        items = point.against.items
        return (count / items, *exact_interval(count, items))

    def grid(self) -> list[PointResult]:
        """Points without pressure: by arm, then without and with a pool, and with drafts last."""
        own = [point for point in self.points if not point.row["pressure_mib"]]
        return sorted(own, key=_grid_place)

    def find(self, arm: str, *, pool: bool, drafts: bool) -> PointResult | None:
        """A point of the grid."""
        name = f"{arm}/{'pool' if pool else 'no-pool'}/{'mtp' if drafts else 'plain'}"
        return next((point for point in self.points if point.name == name), None)

    def ladder(self, arm: str) -> list[PointResult]:
        """Points of an arm under pressure: the smallest stores first, then the rarest."""
        own = [p for p in self.points if p.row["arm"] == arm and p.row["pressure_mib"]]
        return sorted(own, key=lambda point: point.pressure)


def _grid_place(point: PointResult) -> tuple[int, bool, int]:
    row = point.row
    return (
        _ARMS.index(row["arm"]) if row["arm"] in _ARMS else len(_ARMS),
        row["pool_gib"] is not None,
        row["draft_tokens"] or 0,
    )


def reference_point(points: pd.DataFrame) -> str | None:
    """Identity of the point that all others are compared with; ``None`` if it has no answers."""
    plain = points[
        (points["arm"] == HOLD)
        & points["pool_gib"].isna()
        & (points["draft_tokens"] == 0)
        & (points["pressure_mib"] == 0)
        & points["strict"].notna()
    ]
    return None if plain.empty else str(plain["point_id"].iloc[0])


def changed_items(items: pd.DataFrame, first: str, second: str) -> ChangedItems:
    """Two points of one run, item by item."""
    sides = [items[items["point_id"] == name].set_index("item") for name in (first, second)]
    both = sides[0].merge(sides[1], left_index=True, right_index=True, suffixes=("", "_2"))
    answered = (both["outcome"] == "ok") & (both["outcome_2"] == "ok")
    right, right_2 = (both[name].astype(str) == "True" for name in ("strict", "strict_2"))
    return ChangedItems(
        compared=int(answered.sum()),
        changed=int((answered & (both["answer_hash"] != both["answer_hash_2"])).sum()),
        failed=int((both["outcome_2"] != "ok").sum()),
        lost=int((right & ~right_2).sum()),
        gained=int((~right & right_2).sum()),
        items=len(both),
    )


def load_set(run: Run, source: str) -> AccuracySet:
    """The points of a run with what follows from them."""
    table, items = run.tables["points"], run.tables["items"]
    reference = reference_point(table)
    found = []
    for row in table.sort_values("order").to_dict("records"):
        plain = {str(name): _plain(value) for name, value in row.items()}
        score = None
        if plain["strict"] is not None:
            rate = plain["strict"] / plain["items"]
            score = (rate, *wilson_interval(int(plain["strict"]), int(plain["items"])))
        drafted = plain["drafted_tokens"]
        acceptance = plain["accepted_tokens"] / drafted if drafted else None
        against = None
        if reference is not None and plain["point_id"] != reference and score is not None:
            against = changed_items(items, reference, str(plain["point_id"]))
        found.append(PointResult(plain, score, acceptance, against))
    return AccuracySet(run.provenance.evidence, source, run, tuple(found))


def _plain(value: Any) -> Any:
    if value is None or (isinstance(value, float) and math.isnan(value)) or value is pd.NA:
        return None
    return value.item() if isinstance(value, np.generic) else value


def points_table(points: Sequence[PointResult], *, noise: bool) -> pd.DataFrame:
    """A line a point: score, acceptance, nets, and answers beside the reference's."""
    lines = []
    for point in points:
        row, against = point.row, point.against
        line: dict[str, Any] = {"point": point.name, "ended": row["outcome"]}
        if not noise:
            line["strict-match, 95%"] = (
                NOTHING if point.score is None else interval_text(point.score)
            )
            line["right"] = NOTHING if row["strict"] is None else f"{row['strict']}/{row['items']}"
        line |= {
            "acceptance": NOTHING if point.acceptance is None else f"{point.acceptance:.1%}",
            "tokens a step": NOTHING if point.mean_length is None else f"{point.mean_length:.2f}",
            "stale reads": NOTHING if point.stale is None else f"{point.stale:,}",
            "guard errors": _count(row["guard_errors"]),
            "failed": _count(row["failed_requests"]),
            "changed": "reference" if against is None else f"{against.changed}/{against.compared}",
        }
        if not noise:
            line["lost, gained"] = (
                NOTHING if against is None else f"{against.lost}, {against.gained}"
            )
            line["p (McNemar)"] = NOTHING if against is None else p_text(against.p)
        lines.append(line)
    return pd.DataFrame(lines)


def interval_text(score: tuple[float, float, float]) -> str:
    """A rate with its interval."""
    return f"{score[0]:.4f} [{score[1]:.4f}, {score[2]:.4f}]"


def p_text(p: float) -> str:
    """A p value; the smallest ones are no number of a computer."""
    return f"{p:.2g}" if p > 1e-300 else "< 1e-300"


def _count(value: Any) -> str:
    return NOTHING if value is None else f"{int(value):,}"


def floor(found: AccuracySet) -> list[PointResult]:
    """Points of hold beside the reference: what differs there is no fault of a protocol."""
    return [p for p in found.points if p.row["arm"] in (HOLD, TWIN) and p.against is not None]


def twin_pairs(found: AccuracySet) -> list[tuple[str, ChangedItems]]:
    """The null arm: hold against the same again, by pool and drafts."""
    items = found.run.tables["items"]
    pairs = []
    for point in found.grid():
        twin = str(point.row["arm"] or "")
        first = point.name.replace(TWIN, HOLD, 1)
        if twin == TWIN and any(p.name == first and p.score is not None for p in found.points):
            pairs.append((point.name.partition("/")[2], changed_items(items, first, point.name)))
    return pairs


def twins_table(pairs: Sequence[tuple[str, ChangedItems]]) -> pd.DataFrame:
    """The null arm as a table."""
    return pd.DataFrame(
        [
            {
                "hold against hold, again": name,
                "other words": f"{pair.changed}/{pair.compared}",
                "failed": pair.failed,
                "lost, gained": f"{pair.lost}, {pair.gained}",
                "p (McNemar)": p_text(pair.p),
            }
            for name, pair in pairs
        ]
    )


def acceptance_difference(
    found: AccuracySet, first: PointResult, second: PointResult, seed: int = 0
) -> tuple[float, float, float] | None:
    """Difference of two points' acceptance in percentage points, with a bootstrap over items.

    Tokens that a step brought, an item, stand for accepted drafts: the first step brings one token,
    and each later one the accepted drafts and one more. The engine's own counters also count drafts
    behind an answer's end, of which a step that was launched before the end was known has some.
    """
    drafts = first.row["draft_tokens"]
    items = found.run.tables["items"]
    sides = []
    for point in (first, second):
        own = items[(items["point_id"] == point.name) & (items["outcome"] == "ok")]
        own = own[own["steps"].astype(float) > 1].set_index("item")
        sides.append(own[["output_tokens", "steps"]].astype(float))
    both = sides[0].merge(sides[1], left_index=True, right_index=True, suffixes=("", "_2"))
    if both.empty or not drafts:
        return None
    tokens, steps, tokens_2, steps_2 = (both[name].to_numpy() for name in both.columns)

    def apart(drawn: np.ndarray) -> np.ndarray:
        """Of each line of drawn items."""
        # the last step's tokens may end before its drafts do: both points share that
        rates = [
            (count - by)[drawn].sum(axis=-1) / (by - 1)[drawn].sum(axis=-1) / drafts
            for count, by in ((tokens, steps), (tokens_2, steps_2))
        ]
        return 100 * (rates[0] - rates[1])

    spread = apart(np.random.default_rng(seed).integers(0, len(both), (2000, len(both))))
    low, high = np.quantile(spread, [0.025, 0.975])
    return float(apart(np.arange(len(both)))), float(low), float(high)


@dataclass(frozen=True)
class Example:
    """A damaged answer beside the right one.

    Attributes:
        point: where.
        item: its number.
        question: what was asked.
        right: the reference's answer.
        damaged: the point's.
    """

    point: str
    item: int
    question: str
    right: str
    damaged: str


def examples(found: AccuracySet, most: int = 3) -> list[Example]:
    """Damaged answers of unpatched points, the least damaged first, a point and an item once.

    Where scores mean something, a damaged answer is a wrong one whose reference is right.
    """
    texts = found.run.tables["texts"]
    reference = reference_point(found.run.tables["points"])
    if reference is None or texts.empty:
        return []
    settings = found.run.provenance.settings
    known = {name: settings[name] for name in TaskSettings.model_fields if name in settings}
    questions, _ = load_items(TaskSettings.parse(known, where="recorded task"))
    right = texts[texts["point_id"] == reference].set_index("item")["text"].map(json.loads)
    items = found.run.tables["items"]
    is_right = items.set_index(["point_id", "item"])["strict"].astype(str) == "True"
    shown: dict[int, Example] = {}
    bare = [p for p in found.points if p.row["arm"] == UNPATCHED]
    for point in sorted(bare, key=lambda p: found.damaged(p) or 0):
        for row in texts[texts["point_id"] == point.name].to_dict("records"):
            item = int(row["item"])
            text = json.loads(row["text"])
            if item in right.index and text != right[item] and item not in shown:
                if found.has_scores and not (
                    is_right[reference, item] and not is_right[point.name, item]
                ):
                    continue
                question = questions[item].question
                shown[item] = Example(point.name, item, question, right[item], text)
                break
    return list(shown.values())[:most]


def examples_table(found: Sequence[Example], noise: bool) -> pd.DataFrame:
    """Examples as a table."""
    return pd.DataFrame(
        [
            {
                "point": one.point,
                "item": one.item,
                "question": one.question,
                "reference's answer" if noise else "right answer": one.right.replace("\n", " "),
                "this point's answer": one.damaged.replace("\n", " "),
            }
            for one in found
        ]
    )
