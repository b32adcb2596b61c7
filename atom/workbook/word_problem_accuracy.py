"""How many word problems a model solves: ``python -m atom.workbook.word_problem_accuracy MODEL``.

Prints strict-match and flexible-extract with their 95% Wilson intervals, the acceptance of drafts,
and strict-match by number of steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from atom.errors import AtomError

_EPILOG = """\
examples
  python -m atom.workbook.word_problem_accuracy data/models/words8
  python -m atom.workbook.word_problem_accuracy data/models/words8 --items 64 --device virtual \\
    --json outcomes.json

exit codes: 0 evaluated, 2 bad input, 3 the device or the engine failed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate; returns an exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m atom.workbook.word_problem_accuracy",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="checkpoint folder")
    add("--items", type=int, default=1319, metavar="N", help="test items (%(default)s)")
    add("--shots", type=int, default=5, metavar="N", help="examples in a prompt (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of the items (%(default)s)")
    add("--max-tokens", type=int, default=12288, metavar="N", help="longest answer (%(default)s)")
    add("--max-num-seqs", type=int, default=64, metavar="N", help="requests at once (%(default)s)")
    add("--draft-tokens", type=int, default=3, metavar="N", help="MTP drafts (%(default)s)")
    add("--device", default="auto", choices=("auto", "accelerator", "virtual"), help="where")
    add("--json", metavar="FILE", help="write the outcomes there")
    add("--card", action="store_true", help="write the result into the model's card")
    add("--show", type=int, default=0, metavar="N", help="print so many wrong answers")
    try:
        return _evaluate(parser.parse_args(arguments))
    except AtomError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _evaluate(chosen: argparse.Namespace) -> int:
    from atom.benchmarks.gsm8k_task import TaskSettings, prompts_of_test
    from atom.benchmarks.word_problem_accuracy import evaluate
    from atom.device import choose_device, open_device
    from atom.model_engine.engine_settings import EngineSettings
    from atom.models.model_config import ModelConfig
    from atom.models.training_card import record_evaluation
    from atom.workbook.statistics import wilson_interval

    settings = TaskSettings.parse(
        {n: getattr(chosen, n) for n in ("items", "shots", "seed", "max_tokens")}, where="accuracy"
    )
    longest = ModelConfig.from_pretrained(chosen.model).max_position_embeddings
    engine_settings = EngineSettings.parse(
        {
            "draft_tokens": chosen.draft_tokens,
            "max_num_seqs": chosen.max_num_seqs,
            "max_waiting": max(chosen.items, 1024),
            "max_model_len": min(longest, 16384),
            # enough for this set's prompts; the rest of the device is left to others
            "num_kv_blocks": 128 * chosen.max_num_seqs + 1024,
        },
        where="accuracy",
    )
    device = choose_device(chosen.device)
    opened = open_device(device)
    found = evaluate(chosen.model, opened, engine_settings, settings)
    total = len(found.outcomes)
    summary: dict[str, object] = {"model": Path(chosen.model).name, "items": total}
    for name, count in (("strict_match", found.strict), ("flexible_extract", found.flexible)):
        low, high = wilson_interval(count, total)
        summary[name] = count / total
        summary[f"{name}_low"], summary[f"{name}_high"] = low, high
        print(f"{name} {count / total:.4f} [{low:.4f}, {high:.4f}] ({count} of {total})")
    summary["acceptance"] = found.acceptance
    if found.acceptance is not None:
        print(
            f"acceptance {found.acceptance:.4f} ({found.accepted_tokens} of "
            f"{found.drafted_tokens} drafts)"
        )
    for steps in sorted({outcome.steps for outcome in found.outcomes}):
        group = [outcome.strict for outcome in found.outcomes if outcome.steps == steps]
        print(f"{steps} steps: {sum(group)} of {len(group)}")
    print(
        f"{found.generated_tokens} tokens in {found.decode_steps} decode steps, "
        f"{found.seconds:.1f} s"
    )
    if chosen.card:
        summary |= {"shots": settings.shots, "seed": settings.seed, "temperature": 0}
        summary |= {
            "draft_tokens": chosen.draft_tokens,
            "device": f"{device}, {opened.properties.name}",
        }
        record_evaluation(chosen.model, summary)
    if chosen.json:
        content = {**summary, "outcomes": [asdict(outcome) for outcome in found.outcomes]}
        Path(chosen.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if chosen.show:
        asked, _ = prompts_of_test(settings)
        wrong = [o.item for o in found.outcomes if not o.strict][: chosen.show]
        for item in wrong:
            print(f"\n{asked[item].question}\n-- right:\n{asked[item].answer}")
            print(f"-- answered:\n{found.answers[item]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
