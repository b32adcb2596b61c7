"""Specialisations of the gated delta rule's kernels that have to compile for every GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compile_case import CompileCase

_MODULE = "atom.model_ops.gated_delta_rule_triton"
_METADATA = (
    "query_start_loc",
    "num_accepted_tokens",
    "state_slots",
    "state_table",
    "record",
)
_STRIDES = ("q_stride", "k_stride", "v_stride", "gate_stride", "strength_stride")


def _update(
    name: str, dtype: str, guard: int, *, gates_inside: bool = False, **changes: Any
) -> CompileCase:
    gates = f"*{dtype}" if gates_inside else "*fp32"
    signature = dict.fromkeys(("q", "k", "v", "output"), f"*{dtype}")
    signature |= {"gate": gates, "strength": gates, "pool": "*fp32", "scale": "fp32"}
    signature |= dict.fromkeys(_METADATA, "*i32")
    signature |= dict.fromkeys(("pool_slots", "layer", *_STRIDES), "i32")
    constexprs: dict[str, Any] = {"A_log": None, "dt_bias": None}
    if gates_inside:
        constexprs = {}
        signature |= {"A_log": "*fp32", "dt_bias": f"*{dtype}"}
    constexprs |= {
        "KEY_HEADS": 16,
        "HEADS": 32,
        "K": 128,
        "V": 128,
        "BLOCK_K": 128,
        "BLOCK_V": 16,
        "WIDTH": 4,
        "L2_EPS": 1e-6,
        "GATES_INSIDE": gates_inside,
        "GUARD": guard,
        "COUNT_CODE": 2,
        "SLOT_CODE": 4,
    }
    pointers = tuple(key for key, kind in signature.items() if kind.startswith("*"))
    return CompileCase(
        f"gdn update, {name}",
        _MODULE,
        "gated_delta_rule_update_kernel",
        signature,
        constexprs | changes,
        divisible_by_16=(*pointers, "q_stride", "k_stride", "v_stride"),
        options={"num_warps": 1, "debug": guard == 1},
    )


def _replay(name: str, dtype: str, guard: int, **changes: Any) -> CompileCase:
    update = _update(name, dtype, guard, gates_inside=True)
    signature = dict(update.signature)
    for gone in ("state_table", "pool_slots"):
        signature.pop(gone)
    signature |= {"kept": f"*{dtype}", "kept_gates": "*fp32", "context_lens": "*i32"}
    signature["groups"] = "i32"
    constexprs = {
        key: value
        for key, value in update.constexprs.items()
        if key not in ("WIDTH", "GATES_INSIDE")
    }
    pointers = tuple(key for key, kind in signature.items() if kind.startswith("*"))
    return CompileCase(
        f"gdn replay, {name}",
        "atom.model_ops.gated_delta_rule_replay_triton",
        "gated_delta_rule_replay_kernel",
        signature,
        constexprs | {"MOST_TOKENS": 4, "BLOCK_V": 32} | changes,
        divisible_by_16=(*pointers, "q_stride", "k_stride", "v_stride"),
        options=update.options,
    )


CASES = [
    _update("bf16, report", "bf16", 2),
    _update("bf16, none", "bf16", 0),
    _update("bf16, trap", "bf16", 1),
    # as a step with drafts launches it; unguarded it spills 0 to 56 bytes, by Triton's version
    replace(
        _update("bf16, gates inside", "bf16", 2, gates_inside=True, BLOCK_V=64),
        options={"num_warps": 2},
        most_stack=64,
    ),
    _update("fp32, small heads", "fp32", 2, K=8, V=6, BLOCK_K=8, BLOCK_V=8, WIDTH=1),
    _update("fp16, two drafts", "fp16", 2, WIDTH=3),
    # as m395 launches it
    replace(_replay("bf16, report", "bf16", 2, KEY_HEADS=8, HEADS=16), most_stack=0),
    _replay("bf16, trap", "bf16", 1),
    _replay("fp32, small heads", "fp32", 0, K=8, V=6, BLOCK_K=8, BLOCK_V=8, MOST_TOKENS=1),
    CompileCase(
        "gdn gates",
        _MODULE,
        "gdn_gating_kernel",
        {"a": "*bf16", "b": "*bf16", "A_log": "*fp32", "dt_bias": "*bf16"}
        | {"log_decay": "*fp32", "strength": "*fp32"}
        | {"elements": "i32", "a_stride": "i32", "b_stride": "i32"},
        {"HEADS": 32, "BLOCK": 256},
    ),
    CompileCase(
        "gdn gated norm",
        _MODULE,
        "rms_norm_gated_kernel",
        {"x": "*bf16", "gate": "*bf16", "weight": "*bf16", "output": "*bf16", "eps": "fp32"}
        | {"rows": "i32", "x_stride": "i32", "gate_stride": "i32"},
        {"HEADS": 32, "V": 128, "BLOCK_ROWS": 16, "BLOCK_V": 128},
    ),
]
