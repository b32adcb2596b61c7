"""Specialisations of the convolution's kernels that are to compile."""

from __future__ import annotations

from typing import Any

from compile_case import CompileCase

_MODULE = "atom.model_ops.causal_conv1d_triton"
_STRIDES = {
    "x_stride": "i32",
    "weight_channel_stride": "i32",
    "weight_tap_stride": "i32",
    "slot_stride": "i32",
    "row_stride": "i32",
    "out_stride": "i32",
}


def _pointers(*names: str, dtype: str) -> dict[str, str]:
    index = {"query_start_loc", "state_slots", "num_accepted_tokens", "context_lens", "record"}
    return {name: "*i32" if name in index else f"*{dtype}" for name in names}


def _update(
    name: str,
    dtype: str,
    guard: int,
    debug: bool = False,
    packed: bool = False,
    width: int = 4,
    most_tokens: int = 4,
) -> CompileCase:
    signature = _pointers(
        "x",
        "weight",
        "bias",
        "conv_state",
        "out",
        "query_start_loc",
        "state_slots",
        "num_accepted_tokens",
        "record",
        dtype=dtype,
    )
    signature |= {"slots": "i32", "dim": "i32", "layer": "i32", **_STRIDES}
    constexprs: dict[str, Any] = {
        "WIDTH": width,
        "MOST_TOKENS": most_tokens,
        "TOKENS": most_tokens,
        "HAS_BIAS": not packed,
        "SILU": True,
        "GUARD": guard,
        "COUNT_CODE": 1,
        "SLOT_CODE": 3,
        "BLOCK": 512,
    }
    aligned = [key for key, kind in signature.items() if kind.startswith("*")]
    if packed:
        # as the engine launches it: packed weights, no bias
        del signature["weight_channel_stride"], signature["bias"]
        constexprs |= {"weight_channel_stride": 1, "bias": None}
        aligned.remove("bias")
        aligned += ["dim", "x_stride", "slot_stride", "row_stride", "out_stride"]
        aligned += ["weight_tap_stride"]
    return CompileCase(
        name=f"causal_conv1d_update-{name}",
        module=_MODULE,
        kernel="causal_conv1d_update_kernel",
        signature=signature,
        constexprs=constexprs,
        divisible_by_16=tuple(aligned),
        options={"num_warps": 4, "debug": debug},
    )


def _prefill(name: str, dtype: str, bias: bool) -> CompileCase:
    signature = _pointers(
        "x",
        "weight",
        "bias",
        "conv_state",
        "out",
        "query_start_loc",
        "state_slots",
        "context_lens",
        dtype=dtype,
    )
    signature |= {"dim": "i32", **_STRIDES}
    return CompileCase(
        name=f"causal_conv1d_prefill-{name}",
        module=_MODULE,
        kernel="causal_conv1d_prefill_kernel",
        signature=signature,
        constexprs={"WIDTH": 4, "HAS_BIAS": bias, "SILU": True, "TOKENS": 16, "BLOCK": 256},
        options={"num_warps": 4},
    )


CASES = [
    _update("bf16-report-packed", "bf16", 2, packed=True),
    _update("bf16-none-packed", "bf16", 0, packed=True),
    _update("fp32-report", "fp32", 2),
    _update("fp32-narrow", "fp32", 2, width=2, most_tokens=1),
    _update("bf16-wide", "bf16", 0, width=5, most_tokens=5),
    _update("bf16-trap", "bf16", 1),
    _update("bf16-trap-debug", "bf16", 1, debug=True),
    _prefill("bf16", "bf16", bias=False),
    _prefill("fp32-bias", "fp32", bias=True),
]
