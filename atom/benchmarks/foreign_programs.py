"""Programs of other libraries that move data beside their computation, small enough for seconds.

Models are tiny and random: nothing is downloaded. Each program is a function that builds its parts
and returns one step. No step waits for the device where its library does not: the sanitizer looks
for missing waits.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Step = Callable[[], None]


@dataclass(frozen=True)
class Program:
    """A program to watch.

    Attributes:
        name: of the program.
        library: the distribution whose code it runs.
        make: builds it on a device (``cuda`` or ``cpu``) and returns a step.
        steps: timed steps.
        on_cpu: whether it means anything without a GPU.
    """

    name: str
    library: str
    make: Callable[[str], Step]
    steps: int
    on_cpu: bool = False

    def version(self) -> str | None:
        """Version of the library, ``None`` if it is not installed."""
        try:
            return importlib.metadata.version(self.library)
        except importlib.metadata.PackageNotFoundError:
            return None


def _causal_model(place: str, layers: int = 6) -> Any:
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    kind = torch.bfloat16 if place == "cuda" else torch.float32
    return made.to(place, kind).eval()


def _continuous_batching(place: str, *, graphs: bool, asynchronous: bool) -> Step:
    generation = importlib.import_module("transformers.generation.configuration_utils")
    # few layers, tokens and blocks: captures and warm-ups of every batch size are part of it
    model = _causal_model(place, layers=2)
    settings = generation.GenerationConfig(
        max_new_tokens=6, do_sample=False, eos_token_id=1023, pad_token_id=0, bos_token_id=1
    )
    batching = generation.ContinuousBatchingConfig(
        block_size=32,
        num_blocks=64,
        max_batch_tokens=128,
        max_blocks_per_request=0,
        use_cuda_graph=graphs,
        use_async_batching=asynchronous,
    )
    random = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(2, 1000, (length,), generator=random).tolist() for length in (12, 40, 60, 25)
    ]

    def step() -> None:
        done = model.generate_batch(
            prompts, generation_config=settings, continuous_batching_config=batching
        )
        short = [name for name, each in done.items() if not each.generated_tokens]
        if len(done) != len(prompts) or short:
            raise RuntimeError(f"{len(done)} of {len(prompts)} requests, {len(short)} empty")

    return step


def _offloaded_cache(place: str) -> Step:
    model = _causal_model(place)
    torch.manual_seed(0)
    ids = torch.randint(2, 1000, (8, 256), device=place)
    mask = torch.ones_like(ids)

    def step() -> None:
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=16,
            min_new_tokens=16,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="offloaded",
        )

    return step


def _device(place: str) -> torch.device:
    # a number is a device of its own to accelerate, also for the CPU
    return torch.device(place, 0) if place == "cuda" else torch.device(place)


def _offload_hooks(place: str) -> Step:
    accelerate = importlib.import_module("accelerate")
    model = _causal_model("cpu")
    accelerate.cpu_offload(model, execution_device=_device(place))
    ids = torch.randint(2, 1000, (4, 64))

    def step() -> None:
        with torch.no_grad():
            logits = model(ids.to(place), use_cache=False).logits
        logits.argmax(dim=-1).to("cpu")

    return step


def _network(place: str) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True, dropout=0.1)
    return nn.Sequential(nn.TransformerEncoder(layer, 3), nn.Linear(256, 16)).to(place)


def _training_loop(place: str) -> Step:
    data = TensorDataset(torch.randn(256, 32, 256), torch.randint(0, 16, (256, 32)))
    model = _network(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pinned = place == "cuda"
    loader: DataLoader[Any] = DataLoader(
        data, batch_size=32, shuffle=True, pin_memory=pinned, num_workers=2 if pinned else 0
    )

    def step() -> None:
        running = torch.zeros((), device=place)
        for inputs, targets in loader:
            inputs = inputs.to(place, non_blocking=True)
            targets = targets.to(place, non_blocking=True)
            with torch.autocast(place, dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            running += loss.detach()
        running.item()

    return step


def _saved_on_cpu(place: str) -> Step:
    model = _network(place)
    inputs: Tensor = torch.randn(32, 32, 256, device=place)

    def step() -> None:
        with torch.autograd.graph.save_on_cpu(pin_memory=place == "cuda"):
            loss = model(inputs).float().square().mean()
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


PROGRAMS: dict[str, Program] = {
    each.name: each
    for each in (
        Program("offloaded cache", "transformers", _offloaded_cache, 3),
        Program("offload hooks", "accelerate", _offload_hooks, 6),
        Program("training loop", "torch", _training_loop, 2, on_cpu=True),
        Program("activations saved on the CPU", "torch", _saved_on_cpu, 6, on_cpu=True),
        Program(
            "continuous batching, asynchronous, graphs",
            "transformers",
            lambda place: _continuous_batching(place, graphs=True, asynchronous=True),
            1,
        ),
        Program(
            "continuous batching",
            "transformers",
            lambda place: _continuous_batching(place, graphs=False, asynchronous=False),
            1,
        ),
    )
}


def programs_for(place: str) -> Iterator[Program]:
    """Programs that mean something on ``place``."""
    return (each for each in PROGRAMS.values() if place == "cuda" or each.on_cpu)
