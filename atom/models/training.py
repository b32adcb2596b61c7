"""The training loop: settings, schedule, checkpoints, loss curve.

A run ends by its time limit, by a signal, or when its schedule is done; in each case it leaves a
checkpoint from which another run goes on.
"""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from atom.config import Settings
from atom.errors import BadInput
from atom.models.model_config import ModelConfig
from atom.models.training_data import TokenPool
from atom.models.training_layers import CHUNK_TOKENS
from atom.models.training_model import DRAFT_PASSES, Losses, TrainingModel
from atom.models.training_optimizer import TrainingOptimizer

CHECKPOINT = "checkpoint.pt"
#: steps between two points of the loss curve
_CURVE_STEPS = 20
#: seconds kept back of a time limit for the checkpoint and the weights
_SAVE_SECONDS = 4.0
#: steps that run one kernel after the other, before they become a graph
_STEPS_BEFORE_GRAPH = 3


class TrainingSettings(Settings):
    """How a model is trained."""

    seed: int = Field(0, ge=0, le=2**31 - 1)
    """Of the weights and of the order of examples."""

    rows: int = Field(56, ge=1, le=4096)
    """Conversations of a step."""

    length: int = Field(1280, ge=CHUNK_TOKENS, le=2**16, multiple_of=CHUNK_TOKENS)
    """Tokens of each."""

    learning_rate: float = Field(4e-3, gt=0, le=1)
    """Its highest value."""

    warmup_steps: int = Field(100, ge=0, le=10**6)
    """Steps until then; afterwards it falls in a straight line to 0."""

    weight_decay: float = Field(0.1, ge=0, le=10)
    """Of matrices, times the learning rate a step."""

    muon: bool = True
    """Whether Muon trains the layers' matrices, else AdamW does."""

    question_weight: float = Field(0.1, ge=0, le=1)
    """Weight of tokens that the model need not write, beside 1 of those that it must."""

    draft_weight: float = Field(0.2, ge=0, le=10)
    """Weight of each pass of the MTP layer, beside 1 of the model."""

    draft_passes: int = Field(DRAFT_PASSES, ge=1, le=DRAFT_PASSES)
    """Passes of the MTP layer that are learned: 1 learns to draft one token, as is common."""

    draft_places: int = Field(64, ge=1, le=2**16)
    """Places of a conversation that drafts go on from."""

    clip: float = Field(1.0, gt=0, le=1e6)
    """Longest gradient."""

    steps: int = Field(0, ge=0, le=10**8)
    """Steps of the schedule; 0 goes by time."""


@dataclass
class TrainingState:
    """Where a training stands.

    Attributes:
        step: steps taken.
        seconds: seconds of training, over all runs; compilation is left out.
        tokens: tokens trained on.
        curve: points of the loss curve.
    """

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """One model in training.

    Args:
        config: the model.
        settings: how it is trained.
        pool: what on.
        folder: keeps the checkpoint; one found there is gone on from.
        device: ``cuda`` computes in 16 bits where that is safe, ``cpu`` in float32.
        compiled: whether torch.compile makes the kernels.
        graphed: whether all steps but the first few run as one device graph; on a GPU only.

    Raises:
        BadInput: a checkpoint of another model or other settings.
    """

    def __init__(
        self,
        config: ModelConfig,
        settings: TrainingSettings,
        pool: TokenPool,
        folder: str | Path,
        *,
        device: str = "cpu",
        compiled: bool = False,
        graphed: bool = False,
    ) -> None:
        self._graphed = graphed
        self.config, self.settings, self.folder = config, settings, Path(folder)
        self.device = torch.device(device)
        self.pool = pool.to(device)
        model = TrainingModel(config, seed=settings.seed, compiled=compiled)
        self.model = model.to(device)
        self.optimizer = TrainingOptimizer(
            self.model, weight_decay=settings.weight_decay, muon=settings.muon
        )
        self._graph: tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...], Losses] | None = None
        self.state = TrainingState()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    # -- checkpoints
    def _facts(self) -> dict[str, Any]:
        return {"config": self.config.to_dict(), "settings": self.settings.model_dump()}

    def _resume(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.exists():
            return
        try:
            kept = torch.load(path, map_location=self.device, weights_only=True)
        except Exception as error:
            # torch raises whatever its readers raise
            raise BadInput(f"{path}: damaged ({error}); move it away to begin anew") from None
        facts = self._facts()
        for part in ("config", "settings"):
            changed = [n for n, v in facts[part].items() if kept[part].get(n) != v]
            if changed:
                name = changed[0]
                raise BadInput(
                    f"{path}: trained with {name}={kept[part].get(name)!r}, asked for "
                    f"{facts[part][name]!r}; give the same options or another folder"
                )
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        self.state = TrainingState(**kept["state"])

    def save(self) -> Path:
        """Write the checkpoint, whole or not at all."""
        path = self.folder / CHECKPOINT
        part = path.with_suffix(".part")
        content = {
            **self._facts(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": asdict(self.state),
        }
        torch.save(content, part)
        part.replace(path)
        return path

    # -- steps
    def learning_rate(self, progress: float) -> float:
        """The rate once so much of the schedule (0 to 1) is done."""
        settings = self.settings
        warm = min(1.0, (self.state.step + 1) / max(1, settings.warmup_steps))
        return settings.learning_rate * warm * max(0.0, 1.0 - progress)

    def step(self, progress: float) -> Losses:
        """Take one step. Where it runs in a graph, the next step overwrites what is returned."""
        batch = self._batch()
        self.optimizer.set_learning_rate(self.learning_rate(progress))
        if self._graph is None:
            losses = self._compute(*batch)
        else:
            graph, places, losses = self._graph
            for place, value in zip(places, batch, strict=True):
                place.copy_(value)
            graph.replay()
        self.state.step += 1
        self.state.tokens += self.settings.rows * self.settings.length
        return losses

    def capture(self) -> None:
        """From now on, run steps as one device graph: the host no longer limits them.

        Needs a GPU, and a few steps taken before, so that all kernels are compiled.
        """
        batch = self._batch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            losses = self._compute(*batch)
        self._graph = (graph, batch, losses)

    def _batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, which of them are to be written, and the places that drafts go on from."""
        settings = self.settings
        # every batch has a seed of its own, so that a run that goes on sees new ones
        seed = (settings.seed << 32) + self.state.step
        ids, written = self.pool.rows(seed, settings.rows, settings.length + 1 + DRAFT_PASSES)
        generator = torch.Generator(self.device).manual_seed(seed + 1)
        shape = (settings.rows, settings.draft_places)
        chosen = torch.randint(settings.length - 1, shape, generator=generator, device=self.device)
        return ids, written, chosen

    def _compute(self, ids: Tensor, written: Tensor, chosen: Tensor) -> Losses:
        settings = self.settings
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            losses = self.model.losses(
                ids,
                written,
                chosen,
                question_weight=settings.question_weight,
                draft_weight=settings.draft_weight,
                passes=settings.draft_passes,
            )
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        # without the way back to the parameters, which a captured step must not share
        return replace(losses, total=losses.total.detach())

    def run(
        self,
        *,
        seconds: float = math.inf,
        budget_seconds: float | None = None,
        tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> bool:
        """Train until the schedule is done, the time is over, or SIGINT or SIGTERM comes.

        Args:
            seconds: limit of this run, compilation and the last checkpoint included.
            budget_seconds: training time of the whole schedule; by default what this run has.
            tell: takes lines of progress.

        Returns:
            Whether the schedule is done.

        Raises:
            BadInput: without a limit of steps or time; or the loss is no number any more.
        """
        settings, state = self.settings, self.state
        if not settings.steps and budget_seconds is None and math.isinf(seconds):
            raise BadInput("training: no end is set; give steps or seconds")
        began, done_before = time.monotonic(), state.seconds
        limit = began + seconds - _SAVE_SECONDS
        started: float | None = None
        budget = math.inf if budget_seconds is None else budget_seconds

        def progressed() -> float:
            return state.step / settings.steps if settings.steps else state.seconds / budget

        progress = progressed()
        with _signals() as stopped:
            while progress < 1.0 and not stopped and time.monotonic() < limit:
                losses = self.step(progress)
                if started is None:
                    # the first steps compile
                    if self._graphed:
                        for _ in range(_STEPS_BEFORE_GRAPH):
                            losses = self.step(progress)
                        self.capture()
                    if self.device.type == "cuda":
                        torch.cuda.synchronize()
                    started = time.monotonic()
                    if budget_seconds is None:
                        budget = done_before + limit - started
                    tell(f"first step: {started - began:.1f} s")
                if state.step % _CURVE_STEPS == 0 or state.step == settings.steps:
                    self._note(losses, progress, tell)
                state.seconds = done_before + time.monotonic() - started
                progress = progressed()
            self.save()
        done = progress >= 1.0 or (budget_seconds is None and not settings.steps and not stopped)
        tell(f"step {state.step}: {'done' if done else 'stopped; run again to go on'}")
        return done

    def _note(self, losses: Losses, progress: float, tell: Callable[[str], None]) -> None:
        state = self.state
        point = {
            "step": state.step,
            "seconds": round(state.seconds, 2),
            "tokens": state.tokens,
            "learning_rate": self.learning_rate(progress),
            "loss": losses.model.item(),
            "right": losses.right.item(),
            **{f"draft_{i + 1}_loss": v for i, v in enumerate(losses.drafts.tolist())},
            **{f"draft_{i + 1}_right": v for i, v in enumerate(losses.drafts_right.tolist())},
        }
        if not math.isfinite(point["loss"]):
            raise BadInput(
                f"training: the loss at step {state.step} is {point['loss']}; lower "
                f"learning_rate={self.settings.learning_rate}"
            )
        state.curve.append(point)
        if len(state.curve) % 5 == 0 or state.step <= _CURVE_STEPS:
            speed = state.tokens / state.seconds if state.seconds else 0.0
            tell(
                f"step {state.step} {progress:.0%} loss {point['loss']:.4f} right "
                f"{point['right']:.4f} drafts "
                + " ".join(f"{x:.3f}" for x in losses.drafts_right.tolist())
                + f" {speed / 1e3:,.0f} k tokens/s"
            )


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Signals that came, until the block ends; the second of a kind acts at once."""
    came: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(number, before[number])

    for watched in (signal.SIGINT, signal.SIGTERM):
        before[watched] = signal.signal(watched, note)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
