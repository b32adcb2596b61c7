"""What accuracy rows say: item by item, of the claims, on rows made up by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from atom.benchmarks.accuracy_rows import AccuracyRow
from atom.evidence import Evidence
from atom.workbook.accuracy_analysis import (
    AccuracySet,
    acceptance_difference,
    changed_items,
    examples,
    examples_table,
    floor,
    interval_text,
    load_set,
    p_text,
    reference_point,
    twin_pairs,
    twins_table,
)
from atom.workbook.accuracy_claims import (
    measured_arguments,
    same_answers,
    simulated_arguments,
    worded_apart,
)
from atom.workbook.claims import Verdict, judge, load_claims
from atom.workbook.statistics import mcnemar_exact, smallest_significant_pairs

_ITEMS = 400
_POINTS = {
    "hold/no-pool/plain": ("hold", False, 0),
    "hold/no-pool/mtp": ("hold", False, 3),
    "hold/pool/mtp": ("hold", True, 3),
    "hold, again/no-pool/plain": ("hold, again", False, 0),
    "unpatched/no-pool/mtp": ("unpatched", False, 3),
    "unpatched/pool/mtp": ("unpatched", True, 3),
}


def made_up(damaged: dict[str, int] | None = None, model: str = "words8") -> AccuracySet:
    """Points with 390 of 400 items right; of some, so many of these are damaged."""
    rows, items = [], []
    for order, (name, (arm, pool, drafts)) in enumerate(_POINTS.items()):
        lost = (damaged or {}).get(name, 0)
        row: dict[str, Any] = dict.fromkeys(AccuracyRow.model_fields)
        row |= {
            "point_id": name,
            "arm": arm,
            "order": order,
            "model": model,
            "protocol": arm.partition(",")[0],
            "believes": arm == "unpatched",
            "pool_gib": 0.5 if pool else None,
            "draft_tokens": drafts,
            "pressure_mib": 0.0,
            "pressure_every": 1,
            "outcome": "ok",
            "items": _ITEMS,
            "strict": 390 - lost,
            "failed_requests": 0,
            "stale_statuses": lost,
            "stale_tokens": 0,
            "stale_drafts": 0,
            "drafted_tokens": 3000 if drafts else 0,
            "accepted_tokens": 2100 if drafts else 0,
        }
        rows.append(row)
        items += [
            {
                "point_id": name,
                "item": item,
                "outcome": "ok",
                "strict": item < 390 and item >= lost,
                "answer_hash": f"{item}{'damaged' if item < lost else ''}",
                "output_tokens": 41 if drafts else 40,
                "steps": 14 if drafts else 40,
            }
            for item in range(_ITEMS)
        ]
    provenance = SimpleNamespace(
        evidence=Evidence.MEASURED, run_id="run", machine="h200", profile="H200", settings={}
    )
    tables = {"points": pd.DataFrame(rows), "items": pd.DataFrame(items)}
    return load_set(SimpleNamespace(provenance=provenance, tables=tables), "H200")  # type: ignore[arg-type]


def test_the_reference_is_hold_without_anything() -> None:
    found = made_up()
    assert reference_point(found.run.tables["points"]) == "hold/no-pool/plain"
    assert found.points[0].against is None
    assert found.points[0].score is not None
    assert interval_text(found.points[0].score).startswith("0.9750 [0.954")


def test_items_are_compared_one_by_one() -> None:
    found = made_up({"unpatched/pool/mtp": 7})
    items = found.run.tables["items"]
    pair = changed_items(items, "hold/no-pool/plain", "unpatched/pool/mtp")
    assert (pair.compared, pair.changed, pair.lost, pair.gained, pair.items) == (400, 7, 7, 0, 400)
    assert pair.p == pytest.approx(2 * 0.5**7)
    items.loc[(items["point_id"] == "unpatched/pool/mtp") & (items["item"] < 3), "outcome"] = (
        "error"
    )
    pair = changed_items(items, "hold/no-pool/plain", "unpatched/pool/mtp")
    assert (pair.compared, pair.changed, pair.failed, pair.damaged) == (397, 4, 3, 7)


def test_mcnemar_needs_six_pairs_on_one_side() -> None:
    assert smallest_significant_pairs() == 6
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(3, 3) == 1.0
    with pytest.raises(ValueError, match="0 or more"):
        mcnemar_exact(-1, 0)


def verdicts(found: AccuracySet) -> dict[str, Verdict]:
    claims = load_claims()
    arguments = measured_arguments(found)
    return {
        name: judge(claims[name], "measured", **given).verdict for name, given in arguments.items()
    }


def test_equal_answers_reproduce_the_claims_but_show_no_damage() -> None:
    found = made_up()
    assert verdicts(found) == {
        "acc-08": Verdict.REPRODUCED,
        "acc-09": Verdict.REPRODUCED,
        "acc-11": Verdict.INCONCLUSIVE,
        "acc-12": Verdict.INCONCLUSIVE,
    }
    assert same_answers(found)
    assert len(floor(found)) == 3


def test_damage_without_the_fix_is_found_and_a_loss_with_it_is_too() -> None:
    found = made_up({"unpatched/pool/mtp": 40, "hold/pool/mtp": 20})
    seen = verdicts(found)
    assert seen["acc-12"] is Verdict.REPRODUCED
    assert seen["acc-08"] is Verdict.DIFFERS
    assert not same_answers(found)
    # as much damage in hold's own points is no fault of the protocol
    assert verdicts(made_up({"unpatched/pool/mtp": 4, "hold/pool/mtp": 4}))["acc-12"] is (
        Verdict.INCONCLUSIVE
    )


def test_scores_of_random_weights_settle_nothing_of_scores() -> None:
    assert set(measured_arguments(made_up(model="seeded words1"))) == {"acc-09", "acc-12"}


def test_acceptance_is_compared_over_items() -> None:
    found = made_up()
    first, second = (found.find(arm, pool=False, drafts=True) for arm in ("hold", "unpatched"))
    assert first is not None
    assert second is not None
    both = acceptance_difference(found, first, second)
    assert both is not None
    assert both[0] == 0
    assert both[1] <= 0 <= both[2]
    assert first.mean_length == pytest.approx(1 + 3 * 0.7)


def test_the_simulation_settles_only_beside_its_control() -> None:
    claim = load_claims()["acc-12"]
    given = simulated_arguments(made_up({"unpatched/pool/mtp": 5}))["acc-12"]
    assert judge(claim, "simulated", **given).verdict is Verdict.REPRODUCED_IN_SIMULATION
    assert simulated_arguments(made_up({"unpatched/pool/mtp": 5, "hold/pool/mtp": 1})) == {}
    nothing = simulated_arguments(replace(made_up()))["acc-12"]
    assert judge(claim, "simulated", **nothing).verdict is Verdict.DIFFERS


def test_damage_is_right_answers_lost_where_answers_have_room_to_end() -> None:
    found = made_up({"unpatched/pool/mtp": 5})
    items = found.run.tables["items"]
    # another wording, as right as before
    items.loc[(items["point_id"] == "hold/pool/mtp") & (items["item"] == 9), "answer_hash"] = (
        "other"
    )
    found = load_set(found.run, "H200")
    held, bare = (found.find(arm, pool=True, drafts=True) for arm in ("hold", "unpatched"))
    assert held is not None
    assert bare is not None
    assert found.has_scores
    assert (found.damaged(held), found.damaged(bare)) == (0, 5)
    assert found.damage(found.points[0]) is None
    share = found.damage(bare)
    assert share is not None
    assert share[1] < share[0] == 5 / _ITEMS < share[2]
    assert not made_up(model="seeded words1").has_scores
    found.run.provenance.settings["max_tokens"] = 40
    cut = load_set(found.run, "H200")
    assert not cut.has_scores
    assert cut.damaged(held) == 1
    assert set(measured_arguments(cut)) == {"acc-09", "acc-12"}


def test_the_null_arm_is_hold_against_itself() -> None:
    found = made_up({"hold, again/no-pool/plain": 2})
    pairs = twin_pairs(found)
    assert [name for name, _ in pairs] == ["no-pool/plain"]
    assert (pairs[0][1].changed, pairs[0][1].lost) == (2, 2)
    assert twins_table(pairs)["lost, gained"].tolist() == ["2, 0"]
    assert [point.name for point in found.grid()][:2] == list(_POINTS)[:2]
    assert p_text(0.0) == "< 1e-300"


def test_points_that_are_worded_unlike_the_rest_are_named() -> None:
    found = made_up({"hold/pool/mtp": 4})
    assert worded_apart(found) is None
    items = found.run.tables["items"]
    other = (items["point_id"] == "unpatched/pool/mtp") & (items["item"] < 90)
    items.loc[other, "answer_hash"] += " in other words"
    assert worded_apart(found) == ({"unpatched/pool/mtp": 90}, 4, 0)


def test_an_example_of_damage_is_a_wrong_answer_not_another_wording() -> None:
    found = made_up({"unpatched/pool/mtp": 2})
    reference, bare = "hold/no-pool/plain", "unpatched/pool/mtp"
    rows = [(reference, 1, "#### 4"), (reference, 3, "So #### 5")]
    rows += [(bare, 3, "Then #### 5"), (bare, 1, "4.\n####")]
    texts = pd.DataFrame(rows, columns=["point_id", "item", "text"])
    found.run.tables["texts"] = texts.assign(text=texts["text"].map(json.dumps))
    found.run.provenance.settings.update(items=4, examples=5)
    (shown,) = examples(found)
    assert (shown.point, shown.item, shown.right, shown.damaged) == (bare, 1, "#### 4", "4.\n####")
    assert examples_table([shown], noise=False)["this point's answer"].tolist() == ["4. ####"]
