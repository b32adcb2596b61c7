"""Train a small dense Qwen3-Next model with its MTP layer from scratch.

Leaves in ``--out``: ``checkpoint.pt``, from which another run goes on, and ``model/``, a folder
that the engine and transformers load: weights in bfloat16, tokenizer, loss curve and a card.
SIGINT and SIGTERM save before they end the run; a run with the same options goes on.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from atom.errors import AtomError, BadInput
from atom.options import add_setting, read_value

_EPILOG = """\
examples
  python -m atom.benchmarks.word_problem_tokens --out word_data
  python -m atom.models.train --data word_data --out my_model --size words8 --seconds 480

trains for 8 minutes on a GPU, with the learning rate falling to 0 by then. In several shorter runs:

  python -m atom.models.train --data word_data --out my_model --seconds 120 --budget-seconds 480

four times or more, until it says `done`. On a CPU, to see it work (minutes, and a bad model):

  python -m atom.models.train --data word_data --out my_model --size words1 --device cpu \\
    -p rows 4 -p length 512 --seconds 120

settings (-p NAME VALUE) and their defaults: {settings}

exit codes: 0 done or stopped at a limit or signal, 2 bad input, 3 the device failed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; returns an exit code."""
    try:
        return _train(_parser().parse_args(arguments))
    except AtomError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    from atom.models.training import TrainingSettings
    from atom.models.training_sizes import SIZES

    values = TrainingSettings().model_dump()
    shown = ", ".join(f"{name} {value}" for name, value in values.items())
    parser = argparse.ArgumentParser(
        prog="python -m atom.models.train",
        description=__doc__,
        epilog=_EPILOG.format(settings=shown),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--data", required=True, metavar="DIR", help="folder with tokenizer/ and problems.npz")
    add("--out", required=True, metavar="DIR", help="folder for checkpoint and model")
    add("--size", default="words8", choices=sorted(SIZES), help="the model (%(default)s)")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"), help="where (%(default)s)")
    add("--seconds", type=float, default=math.inf, metavar="S", help="limit of this run")
    add(
        "--budget-seconds",
        type=float,
        metavar="S",
        help="training time of the whole schedule, over several runs (default: this run's)",
    )
    add("--cuda-graph", action="store_true", help="run a GPU's steps as one device graph")
    add("--no-compile", action="store_true", help="do not use torch.compile on a GPU")
    add_setting(parser, "a setting; may be repeated", dest="p")
    return parser


def _train(chosen: argparse.Namespace) -> int:
    for name in ("seconds", "budget_seconds"):
        value = getattr(chosen, name)
        if value is not None and not value > 0:
            raise BadInput(f"--{name.replace('_', '-')} {value}: expected more than 0")
    import torch

    from atom.models.training import Trainer, TrainingSettings
    from atom.models.training_card import export
    from atom.models.training_data import TokenPool
    from atom.models.training_sizes import SIZES, for_tokenizer

    settings = TrainingSettings.parse({n: read_value(n, v) for n, v in chosen.p}, where="train")
    device = chosen.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: torch sees no GPU here; --device cpu is slow, but works")
    torch.set_float32_matmul_precision("high")
    data = Path(chosen.data)
    config = for_tokenizer(SIZES[chosen.size], data / "tokenizer")
    trainer = Trainer(
        config,
        settings,
        TokenPool.load(data / "problems.npz"),
        chosen.out,
        device=device,
        compiled=device == "cuda" and not chosen.no_compile,
        graphed=device == "cuda" and chosen.cuda_graph,
    )
    trainer.run(seconds=chosen.seconds, budget_seconds=chosen.budget_seconds)
    folder = export(trainer, data, Path(chosen.out) / "model")
    print(f"{folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
