"""The arms of the engine-speed experiment: this engine, and transformers' model in a plain loop."""

from __future__ import annotations

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from atom.benchmarks.engine_clock import TimedRunner
from atom.device.interface import Device, DeviceKind
from atom.errors import DeviceError
from atom.model_engine.engine_builder import build_engine
from atom.model_engine.engine_settings import EngineSettings
from atom.model_engine.request_output import RequestOutput
from atom.model_engine.sequence import SamplingParams
from atom.models.weights import LoadedModel

#: first tokens of each request that arms are compared by
COMPARED = 8
_QWEN = "transformers.models.qwen3_next.modeling_qwen3_next"
_PEER_FUNCTIONS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "recurrent_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
)

Prompts = Sequence[Sequence[int]]


class RequestFailed(DeviceError):
    """A request of an arm ended with an error."""


@dataclass
class Window:
    """Some steps of one arm.

    Attributes:
        step_seconds: wall time of each step.
        tokens: that reached the host.
        waits: sums over the steps in seconds, for arms that know them: status, output, staging.
    """

    step_seconds: list[float]
    tokens: int
    waits: tuple[float, float, float] | None = None


class DecodeArm(ABC):
    """Decodes a batch of equal prompts, step by step.

    Attributes:
        first_tokens: of each request, at most :data:`COMPARED`, since :meth:`start`.
        has_drafts: whether steps make drafts.
        kernels: what it computes linear attention with, where that is a question.
    """

    has_drafts = False
    kernels: str | None = None

    def __init__(self) -> None:
        self.first_tokens: list[list[int]] = []

    @abstractmethod
    def start(self, prompts: Prompts) -> None:
        """Compute the prompts; the first token of each has been sampled then.

        Raises:
            RequestFailed: one of them ended with an error.
        """

    @abstractmethod
    def step(self) -> int:
        """One step. Returns the tokens that reached the host.

        Raises:
            RequestFailed: a request ended with an error.
        """

    @abstractmethod
    def stop(self) -> None:
        """Drop the requests."""

    def window(self, steps: int) -> Window:
        """Run and time steps."""
        times, tokens = [], 0
        last = perf_counter()
        for _ in range(steps):
            tokens += self.step()
            now = perf_counter()
            times.append(now - last)
            last = now
        return Window(times, tokens)

    def first_token(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Seconds from a prompt's ids on the host to its first token there, and that token."""
        began = perf_counter()
        self.start([prompt])
        seconds = perf_counter() - began
        token = self.first_tokens[0][0]
        self.stop()
        return seconds, token

    def marked(self, steps: int) -> tuple[list[float], list[float]] | None:
        """Milliseconds of the device in each step and between steps; ``None`` if not known."""
        return None

    def close(self) -> None:  # noqa: B027
        """Give the memory back."""


class EngineArm(DecodeArm):
    """This engine.

    Args:
        loaded: weights.
        settings: of the engine.
        device: where it runs.
        max_tokens: more than any window needs, so that no request ends in one.
        runner_class: what runs its steps.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: EngineSettings,
        device: Device,
        max_tokens: int,
        runner_class: type[TimedRunner] = TimedRunner,
    ) -> None:
        super().__init__()
        self.has_drafts = settings.draft_tokens > 0
        mtp = loaded.mtp if self.has_drafts else None
        self.engine = build_engine(loaded.model, mtp, settings, device, runner_class=runner_class)
        assert isinstance(self.engine.runner, TimedRunner)
        self.runner = self.engine.runner
        self._params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._row: dict[str, int] = {}

    def start(self, prompts: Prompts) -> None:
        """See :class:`DecodeArm`."""
        names = [self.engine.add_request(prompt, self._params) for prompt in prompts]
        self._row = {name: row for row, name in enumerate(names)}
        self.first_tokens = [[] for _ in prompts]
        while not all(self.first_tokens):
            self.step()

    def step(self) -> int:
        """See :class:`DecodeArm`."""
        return self._count(self.engine.step())

    def _count(self, outputs: Sequence[RequestOutput]) -> int:
        tokens = 0
        for output in outputs:
            if output.error is not None:
                raise RequestFailed(f"{output.request_id}: {output.error}")
            tokens += len(output.new_token_ids)
            row = self._row.get(output.request_id)
            if row is not None and len(self.first_tokens[row]) < COMPARED:
                kept = self.first_tokens[row]
                kept += output.new_token_ids[: COMPARED - len(kept)]
        return tokens

    def window(self, steps: int) -> Window:
        """See :class:`DecodeArm`."""
        clock = self.runner.clock
        before = clock.status_wait, clock.output_wait, clock.staging
        window = super().window(steps)
        after = clock.status_wait, clock.output_wait, clock.staging
        window.waits = (after[0] - before[0], after[1] - before[1], after[2] - before[2])
        return window

    def marked(self, steps: int) -> tuple[list[float], list[float]]:
        """See :class:`DecodeArm`."""
        self.runner.mark_steps()
        for _ in range(steps):
            self.step()
        return self.runner.marked_milliseconds()

    def stop(self) -> None:
        """See :class:`DecodeArm`."""
        for name in self._row:
            self.engine.abort_request(name)
        self._row = {}
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def close(self) -> None:
        """See :class:`DecodeArm`."""
        self.engine.close()


class TransformersArm(DecodeArm):
    """transformers' model with its cache: greedy, all rows in step, ids read by the host.

    The host reads each step's ids, as a server that streams them or looks for an end must.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.kernels = peer_kernels(model)
        self._past: Any = None
        self._ids = torch.empty(0)

    def start(self, prompts: Prompts) -> None:
        """See :class:`DecodeArm`."""
        ids = torch.tensor(prompts, dtype=torch.int64).to(self.model.device)
        self.first_tokens = [[] for _ in prompts]
        self._run(input_ids=ids, logits_to_keep=1)

    def step(self) -> int:
        """See :class:`DecodeArm`."""
        return self._run(input_ids=self._ids[:, None], past_key_values=self._past)

    @torch.no_grad()
    def _run(self, **inputs: Any) -> int:
        found = self.model(**inputs, use_cache=True)
        self._past = found.past_key_values
        self._ids = found.logits[:, -1].argmax(dim=-1)
        for kept, token in zip(self.first_tokens, self._ids.tolist(), strict=True):
            if len(kept) < COMPARED:
                kept.append(token)
        return len(self.first_tokens)

    def stop(self) -> None:
        """See :class:`DecodeArm`."""
        self._past = None
        self._ids = torch.empty(0)


def load_peer(folder: str | Path, device: Device, dtype: torch.dtype) -> Any:
    """transformers' model of a checkpoint, or the reason (a text) why there is none.

    From then on transformers reports errors alone in this process.
    """
    try:
        module = importlib.import_module(_QWEN)
    except Exception as error:
        return f"transformers has no Qwen3-Next here: {type(error).__name__}"
    transformers = importlib.import_module("transformers")
    logging = transformers.utils.logging
    # what it computes with is recorded; it also tells of tensors that it has no use for
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = module.Qwen3NextForCausalLM.from_pretrained(str(folder), dtype=dtype)
    place = "cpu" if device.properties.kind is DeviceKind.VIRTUAL else "cuda"
    return model.to(place).eval()


def peer_kernels(model: Any) -> str:
    """Packages that transformers' linear-attention layers take their kernels from."""
    module = importlib.import_module(_QWEN)
    layers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    if not layers:
        return "no linear attention"
    found = []
    for name in _PEER_FUNCTIONS:
        function: Callable[..., Any] | None = getattr(layers[0], name, None)
        function = function or getattr(module, name, None)
        if function is not None:
            package = (inspect.unwrap(function).__module__ or "unknown").split(".")[0]
            found.append(f"{name}: {package}")
    return "; ".join(found) or "unknown"
