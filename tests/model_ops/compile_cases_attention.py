"""What the attention, norm, rotary, gate and step-input kernels are compiled as."""

from __future__ import annotations

from typing import Any

from compile_case import CompileCase

from atom.model_ops.attention_tile_triton import Tiling, decode_tiling, prefill_tiling

_ROOM = "atom.model_ops"
_BATCH = {"query_start_loc": "*i32", "context_lens": "*i32"}


def attention_case(
    name: str,
    head_size: int,
    heads: tuple[int, int],
    tiling: Tiling,
    dtype: str = "bf16",
    block_size: int = 16,
    **constexprs: int | bool,
) -> CompileCase:
    kernel = name.partition(" ")[0]
    signature = {"query": f"*{dtype}", "kv_cache": f"*{dtype}", "output": f"*{dtype}"}
    if kernel == "decode":
        signature |= {"parts": "*fp32", "part_sizes": "*fp32", "splits": "i32"}
    else:
        signature["batch_rows"] = "i32"
    signature |= {**_BATCH, "block_tables": "*i32", "scale": "fp32"}
    integers = ("query_token", "query_head", "cache_half", "table_row", "capacity")
    signature |= dict.fromkeys(integers, "i32")
    # a cache of more than 2**31 elements has a stride of 64 bits
    signature["cache_half"] = "i64"
    pointers = tuple(key for key, kind in signature.items() if kind.startswith("*"))
    values: dict[str, Any] = {
        "RATIO": heads[0] // heads[1],
        "HEADS": heads[1],
        "HEAD_SIZE": head_size,
        "WIDE": 1 << (head_size - 1).bit_length(),
        "BLOCK_SIZE": block_size,
        "QUERIES": tiling.queries,
        "ROWS": tiling.rows,
        "KEYS": tiling.keys,
        **constexprs,
    }
    return CompileCase(
        name=f"{name} {dtype} {head_size}",
        module=f"{_ROOM}.{kernel}_attention_triton",
        kernel=f"{kernel}_kernel",
        signature=signature,
        constexprs=values,
        divisible_by_16=(*pointers, "query_token", "query_head", "cache_half", "capacity"),
        options={"num_warps": tiling.warps, "num_stages": tiling.stages},
    )


def _prefill(head_size: int, heads: tuple[int, int], hip: bool) -> CompileCase:
    tiling = prefill_tiling(heads[0] // heads[1], head_size, 2, hip)
    return attention_case(f"prefill {'hip' if hip else 'cuda'}", head_size, heads, tiling)


def _decode(
    head_size: int, heads: tuple[int, int], hip: bool, queries: int, split: bool
) -> CompileCase:
    tiling = decode_tiling(queries, heads[0] // heads[1], head_size, 2, hip)
    name = f"decode {'hip' if hip else 'cuda'} {queries} queries {'parts' if split else 'whole'}"
    return attention_case(name, head_size, heads, tiling, TILES=1, SPLIT=split)


CASES = [
    _prefill(256, (16, 2), hip=False),
    _prefill(256, (16, 2), hip=True),
    _prefill(80, (6, 2), hip=False),
    _decode(256, (16, 2), hip=False, queries=4, split=True),
    _decode(256, (16, 2), hip=True, queries=4, split=True),
    _decode(128, (16, 2), hip=False, queries=1, split=False),
    CompileCase(
        "join parts",
        f"{_ROOM}.decode_attention_triton",
        "join_parts_kernel",
        {"output": "*bf16", "parts": "*fp32", "part_sizes": "*fp32"}
        | {**_BATCH, "capacity": "i32", "max_query_len": "i32"},
        {"HEADS": 16, "HEAD_SIZE": 256, "QUERIES": 4, "KEYS": 32, "SPLITS": 16, "BLOCK": 256},
    ),
    CompileCase(
        "store kv",
        f"{_ROOM}.paged_attention_triton",
        "store_kv_kernel",
        {"key": "*bf16", "value": "*bf16", "kv_cache": "*bf16", "slot_mapping": "*i64"}
        | dict.fromkeys(("key_token", "key_head", "value_token", "value_head"), "i32")
        | {"cache_half": "i64"},
        {"HEADS": 2, "HEAD_SIZE": 256, "BLOCK": 512},
    ),
    *(
        CompileCase(
            f"rms norm {'with' if add else 'without'} sum",
            f"{_ROOM}.layer_norm_triton",
            "rms_norm_kernel",
            dict.fromkeys(("x", "residual", "weight", "normed", "total"), "*bf16")
            | {"x_row": "i32", "residual_row": "i32", "eps": "fp32", "offset": "fp32"},
            {"WIDTH": 1024, "BLOCK": 1024, "ADD": add},
        )
        for add in (False, True)
    ),
    CompileCase(
        "joined norms",
        f"{_ROOM}.layer_norm_triton",
        "embed_norm_join_kernel",
        dict.fromkeys(("embedding", "hidden", "joined"), "*bf16")
        | dict.fromkeys(("embedding_weight", "hidden_weight"), "*bf16")
        | dict.fromkeys(("ids_stride", "embedding_row", "hidden_row"), "i32")
        | {"ids": "*i64", "eps": "fp32"},
        {"WIDTH": 1024, "BLOCK": 1024},
        divisible_by_16=("embedding", "hidden", "joined", "embedding_row", "hidden_row"),
    ),
    *(
        CompileCase(
            f"head norm and rotary embedding {'with' if store else 'without'} store",
            f"{_ROOM}.rotary_embedding_triton",
            "qk_norm_rope_kernel",
            dict.fromkeys(("q", "k", "v", "q_out", "k_out", "q_weight", "k_weight"), "*bf16")
            | {"positions": "*i64", "cos_sin": "*fp32", "slot_mapping": "*i64"}
            | {"max_positions": "i32", "eps": "fp32", "cache_half": "i64"}
            | dict.fromkeys(("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"), "i32"),
            {"Q_HEADS": 16, "K_HEADS": 2, "HEAD_SIZE": 256, "WIDE": 256}
            | {"ROTARY": 64, "BLOCK_HEADS": 8, "STORE": store},
        )
        for store in (False, True)
    ),
    CompileCase(
        "silu and mul",
        f"{_ROOM}.activation_triton",
        "silu_and_mul_kernel",
        {"gate_up": "*bf16", "output": "*bf16", "row_stride": "i32"},
        {"WIDTH": 2816, "BLOCK": 1024},
    ),
    CompileCase(
        "sigmoid gate",
        f"{_ROOM}.activation_triton",
        "sigmoid_gate_kernel",
        {"attention": "*bf16", "gate": "*bf16", "output": "*bf16"}
        | {"gate_row": "i32", "gate_head": "i32"},
        {"WIDTH": 4096, "HEAD_SIZE": 256, "BLOCK": 1024},
    ),
    *(
        CompileCase(
            f"step inputs {'with' if ids else 'without'} ids",
            f"{_ROOM}.decode_inputs_triton",
            "step_inputs_kernel",
            dict.fromkeys(("metadata", "block_tables", "query_start_loc", "state_table"), "*i32")
            | dict.fromkeys(("token_table", "positions", "slot_mapping", "input_ids"), "*i64")
            | {"draft_ids": "*i64", "num_drafts": "*i32", "draft_positions": "*i64"}
            | {"table_rows": "*i32"}
            | dict.fromkeys(("metadata_row", "table_row", "table_blocks", "groups"), "i32")
            | {"rows": "i32", "num_tokens": "i32"},
            {"BLOCK_SIZE": 16, "COLUMNS": 4, "WIDE_COLUMNS": 4, "ROWS": 256}
            | {"TOKENS": 64, "HAS_IDS": ids, "HAS_DRAFTS": ids},
        )
        for ids in (False, True)
    ),
]
