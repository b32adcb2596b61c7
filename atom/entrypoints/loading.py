"""From the name of a model and a device to an engine that runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from atom.device import choose_device, open_device
from atom.device.interface import DeviceKind
from atom.entrypoints.async_engine import Engine
from atom.model_engine.engine_settings import EngineSettings
from atom.models.model_config import ModelConfig

#: hidden size up to which a second thread costs more than it computes (10 times slower, if the
#: machine is busy)
_ONE_THREAD_SIZE = 256


@dataclass(frozen=True)
class LoadedEngine:
    """An engine with what its server has to know.

    Attributes:
        engine: ready for requests.
        settings: its settings.
        vocab_size: ids of its model.
        device_name: what it runs on.
        simulated: whether that is the virtual device.
    """

    engine: Engine
    settings: EngineSettings
    vocab_size: int
    device_name: str
    simulated: bool


def load(model: str, device_choice: str, values: Mapping[str, Any]) -> LoadedEngine:
    """Load a model. A small one on the virtual device sets torch's CPU threads to one.

    Args:
        model: a checkpoint folder, or ``preset:NAME``.
        device_choice: ``virtual``, ``accelerator``, or ``auto``: the accelerator if there is one.
        values: engine settings by name. ``max_model_len`` is at most what the model was made for;
            by default that, or 32768 if it is less.

    Raises:
        BadInput: a setting, folder or preset that cannot be used, or too little memory.
        DeviceError: no such device.
    """
    from atom.model_engine.engine_builder import PRESET, load_engine
    from atom.models.presets import preset

    config = (
        preset(model.removeprefix(PRESET))
        if model.startswith(PRESET)
        else ModelConfig.from_pretrained(model)
    )
    longest = min(config.max_position_embeddings, 32768)
    settings = EngineSettings.parse({"max_model_len": longest, **values}, where="serve")
    config.refuse_longer(settings.max_model_len, "--max-model-len")
    device = open_device(choose_device(device_choice), seed=settings.seed)
    name = device.properties.name
    simulated = device.properties.kind is DeviceKind.VIRTUAL
    if simulated:
        name = f"the virtual device ({name})"
        if config.hidden_size <= _ONE_THREAD_SIZE:
            torch.set_num_threads(1)
    engine = load_engine(model, settings, device)
    return LoadedEngine(engine, settings, config.vocab_size, name, simulated)
