"""What a ``config.json`` may not ask of this engine. Needs no torch, so it is told at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atom.errors import BadInput

#: dtypes of weights
DTYPES = ("float32", "bfloat16", "float16")
#: transformers' default
DEFAULT_LAYERS = 48
#: no model has more; each is looked at before the checkpoint is
MOST_LAYERS = 10_000
#: fields of ``config.json`` that decide whether a layer has experts, with transformers' defaults
_EXPERT_FIELDS: dict[str, Any] = {
    "num_experts": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def refuse_unrunnable(values: Mapping[str, Any], where: str) -> int:
    """Refuse a model that this engine cannot run, whatever its sizes are.

    Args:
        values: content of a ``config.json``.
        where: named in errors.

    Returns:
        Its decoder layers.

    Raises:
        BadInput: for another architecture, a model with experts, or a kind of activation, rotary
            embedding, quantisation or dtype that is not known here.
    """
    kind = values.get("model_type")
    if kind != "qwen3_next":
        raise BadInput(f"{where}: model_type is {kind!r}; this engine runs 'qwen3_next'")
    layers = values.get("num_hidden_layers")
    layers = DEFAULT_LAYERS if layers is None else layers
    if type(layers) is not int or layers > MOST_LAYERS:
        raise BadInput(
            f"{where}: num_hidden_layers={layers!r}; expected a whole number, at most {MOST_LAYERS}"
        )
    _refuse_experts(values, layers, where)
    _refuse_unsupported(values, where)
    return layers


def _refuse_experts(values: Mapping[str, Any], layers: int, where: str) -> None:
    found = {
        name: default if values.get(name) is None else values[name]
        for name, default in _EXPERT_FIELDS.items()
    }
    experts, step, dense = (
        found["num_experts"],
        found["decoder_sparse_step"],
        found["mlp_only_layers"],
    )
    if type(experts) is not int or type(step) is not int or step < 1 or not isinstance(dense, list):
        raise BadInput(f"{where}: cannot tell which layers have experts from {found}")
    # transformers' rule for a layer of experts
    sparse = [i for i in range(layers) if experts > 0 and i not in dense and (i + 1) % step == 0]
    if not sparse:
        return
    shown = ", ".join(
        f"{name}={found[name]!r}" + ("" if name in values else " (its default)") for name in found
    )
    which = "all layers" if len(sparse) == layers else f"layers {', '.join(map(str, sparse[:4]))}"
    raise BadInput(
        f"{where}: {which}{' ...' if 4 < len(sparse) < layers else ''} have experts ({shown}); "
        f"this engine runs dense models: num_experts=0, or mlp_only_layers naming every layer"
    )


def _refuse_unsupported(values: Mapping[str, Any], where: str) -> None:
    act = values.get("hidden_act", "silu")
    if act != "silu":
        raise BadInput(f"{where}: hidden_act is {act!r}; this engine knows 'silu'")
    if values.get("quantization_config"):
        raise BadInput(
            f"{where}: quantization_config is set; this engine reads unquantised weights "
            f"({', '.join(DTYPES)})"
        )
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise BadInput(f"{where}: rope parameters are {rope!r}; expected a JSON object")
    rope_kind = rope.get("rope_type", rope.get("type", "default"))
    if rope_kind != "default":
        raise BadInput(f"{where}: rope_type is {rope_kind!r}; this engine knows 'default'")
    dtype = values.get("dtype") or values.get("torch_dtype")
    if dtype is not None and dtype not in DTYPES:
        raise BadInput(f"{where}: dtype is {dtype!r}; known: {', '.join(DTYPES)}")
