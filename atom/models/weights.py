"""Checkpoints: safetensors files under Hugging Face names, loaded and saved.

Names and shapes are checked against the files' headers before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atom.errors import BadInput
from atom.models.decoder_layer import Parts
from atom.models.json_file import write_json
from atom.models.model_config import ModelConfig
from atom.models.qwen3_next import Qwen3NextForCausalLM
from atom.models.qwen3_next_mtp import Qwen3NextMTP

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MTP = "mtp."
#: names listed in an error
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A checkpoint in memory.

    Attributes:
        config: its sizes.
        model: the language model.
        mtp: its MTP layer, or ``None``.
    """

    config: ModelConfig
    model: Qwen3NextForCausalLM
    mtp: Qwen3NextMTP | None


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    with_mtp: bool | None = None,
    max_positions: int | None = None,
) -> LoadedModel:
    """Load a checkpoint folder: ``config.json`` and safetensors files, sharded or not.

    Args:
        folder: the checkpoint.
        dtype: dtype of the weights in memory; the checkpoint's by default. Decay and step-size
            parameters of the gated delta net stay in float32.
        device: where the weights shall lie.
        with_mtp: whether to load the MTP layer; by default if the checkpoint has one.
        max_positions: positions of the rotary table; the model's longest sequence by default.

    Raises:
        BadInput: for a model with experts, before anything else of it is read; for a missing,
            unexpected or wrongly shaped tensor, naming it; for a file that cannot be read; for
            weights that do not fit into the device's memory.
    """
    config = ModelConfig.from_pretrained(folder)
    with ExitStack() as stack:
        files = _open_all(Path(folder), stack)
        has_mtp = any(name.startswith(_MTP) for name in files)
        if with_mtp and not has_mtp:
            raise BadInput(
                f"{folder}: no tensor is named {_MTP}*: this checkpoint has no MTP layer; run it "
                f"without speculation"
            )
        drafts = has_mtp if with_mtp is None else with_mtp

        def make(
            place: torch.device | str, positions: int | None
        ) -> tuple[Qwen3NextForCausalLM, Qwen3NextMTP | None]:
            model = Qwen3NextForCausalLM(config, dtype=dtype, device=place, max_positions=positions)
            return model, Qwen3NextMTP(model) if drafts else None

        # before any memory is taken: a config.json of another model may ask for any amount
        try:
            # the rotary table is computed on the host, wherever it lies then
            outline = checkpoint_parts(*make("meta", 1))
        except (RuntimeError, TypeError) as error:
            why = str(error).partition("\n")[0]
            raise BadInput(f"{folder}: config.json has impossible sizes: {why}") from None
        _check_names(folder, outline, _wanted(files, config, with_mtp=drafts), files)
        try:
            model, mtp = make(device, max_positions)
        except torch.OutOfMemoryError:
            parameters = {id(part.parameter): part.parameter for part in outline.values()}
            size = sum(parameter.nbytes for parameter in parameters.values())
            raise BadInput(
                f"{folder}: the weights take {size:,} bytes, more than {device} has free; take a "
                "larger device, or end what else lies on it"
            ) from None
        parts = checkpoint_parts(model, mtp)
        try:
            for name, part in parts.items():
                part.load(files[name].get_tensor(name))
        except SafetensorError as error:
            raise BadInput(f"{folder}: {error}") from None
    return LoadedModel(config, model, mtp)


def save_model(
    folder: str | Path, model: Qwen3NextForCausalLM, mtp: Qwen3NextMTP | None = None
) -> None:
    """Write ``config.json`` and one safetensors file into ``folder``, which is made if need be."""
    tensors = {name: part.save() for name, part in checkpoint_parts(model, mtp).items()}
    write_checkpoint(folder, model.config, tensors)


def write_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    shard_bytes: int | None = None,
) -> None:
    """Write a checkpoint from tensors under Hugging Face names.

    Args:
        folder: made if need be.
        config: the model.
        tensors: its tensors by name.
        shard_bytes: most bytes of tensors a file; ``None`` writes one file.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shard_bytes is not None and shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    # transformers refuses a file that does not say which framework wrote it
    metadata = {"format": "pt"}
    if len(shards) == 1:
        save_file(shards[0], str(Path(folder) / _SINGLE), metadata=metadata)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, str(Path(folder) / file), metadata=metadata)
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_json(Path(folder) / _INDEX, index)


def checkpoint_parts(model: Qwen3NextForCausalLM, mtp: Qwen3NextMTP | None) -> Parts:
    """Checkpoint tensors of a model and its MTP layer by name."""
    return model.parts() | (mtp.parts() if mtp is not None else {})


def check_checkpoint(folder: str | Path) -> None:
    """Open every file of a checkpoint, read no weights.

    Raises:
        BadInput: a file is missing or damaged; says which.
    """
    with ExitStack() as stack:
        _open_all(Path(folder), stack)


def _open_all(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """The open file of each tensor name."""
    index = folder / _INDEX
    try:
        if index.exists():
            paths = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        else:
            paths = [_SINGLE]
        found: dict[str, Any] = {}
        for name in paths:
            if not (folder / name).is_file():
                raise BadInput(
                    f"{folder}: no file {name}; expected {_SINGLE}, or {_INDEX} and its files"
                )
            file = stack.enter_context(safe_open(str(folder / name), framework="pt", device="cpu"))
            found |= dict.fromkeys(file.keys(), file)
    except (SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"{folder}: damaged checkpoint: {error!r}") from None
    return found


def _wanted(names: Iterable[str], config: ModelConfig, *, with_mtp: bool) -> set[str]:
    """Names that must have a place here."""
    skipped = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {
        name for name in names if name not in skipped and (with_mtp or not name.startswith(_MTP))
    }


def _check_names(
    folder: str | Path, parts: Parts, wanted: set[str], files: Mapping[str, Any]
) -> None:
    faults = []
    missing = [name for name in parts if name not in files]
    unexpected = sorted(wanted - parts.keys())
    for word, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            faults.append(f"{word}: {', '.join(names[:_SHOWN])}{more}")
    for name, part in parts.items():
        if name in files:
            shape = tuple(files[name].get_slice(name).get_shape())
            if shape != part.shape:
                faults.append(f"{name} is {list(shape)}; config.json says {list(part.shape)}")
    if faults:
        shown = "\n".join(f"  {fault}" for fault in faults[: 2 * _SHOWN])
        raise BadInput(f"{folder}: the tensors do not fit config.json:\n{shown}")
