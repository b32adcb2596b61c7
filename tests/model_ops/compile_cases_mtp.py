"""The draft plan's kernel, for decode with three drafts and for prompt chunks; the likeliest id."""

from __future__ import annotations

from compile_case import CompileCase

_TENSORS = {
    "query_start_loc": "*i32",
    "positions": "*i64",
    "block_tables": "*i32",
    "input_ids": "*i64",
    "sampled_ids": "*i64",
    "num_bonus": "*i32",
    "known_next_ids": "*i64",
    "next_ids": "*i64",
    "last_index": "*i64",
    "new_start_loc": "*i32",
    "new_positions": "*i64",
    "new_contexts": "*i32",
    "new_slots": "*i64",
}
_NUMBERS = dict.fromkeys(("table_row", "table_blocks", "rows", "num_tokens"), "i32")
_SIZES = {"PASSES": 3, "WIDE_PASSES": 4, "BLOCK_SIZE": 16, "COLUMNS": 4, "ROWS": 64}

CASES = [
    CompileCase(
        name=f"draft plan {'prefill' if prefill else 'decode'}",
        module="atom.spec_decode.mtp_triton",
        kernel="draft_plan_kernel",
        signature=_TENSORS | _NUMBERS,
        constexprs={
            **_SIZES,
            "CHUNK": 1024 if prefill else 64,
            "IS_PREFILL": prefill,
            "HAS_SAMPLED": True,
            "HAS_KNOWN": prefill,
        },
        # decode is given views of one tensor of numbers, whose rows may begin anywhere
        divisible_by_16=("input_ids", "next_ids"),
        options={"num_warps": 4},
    )
    for prefill in (False, True)
]
_PARTS = {"part_best": "*fp32", "part_place": "*i32", "part_sum": "*fp32", "parts": "i32"}
CASES += [
    CompileCase(
        name=f"likeliest id of {dtype}, parts",
        module="atom.spec_decode.mtp_triton",
        kernel="likeliest_part_kernel",
        signature={"logits": f"*{dtype}", **_PARTS, "stride": "i32", "vocabulary": "i32"},
        constexprs={"CHUNK": 4096},
        divisible_by_16=("logits", "stride", "vocabulary"),
        options={"num_warps": 4},
    )
    for dtype in ("bf16", "fp32")
]
CASES += [
    CompileCase(
        name="likeliest id, join",
        module="atom.spec_decode.mtp_triton",
        kernel="likeliest_join_kernel",
        signature={"ids": "*i64", "confidence": "*fp32", **_PARTS}
        | {"ids_stride": "i32", "confidence_stride": "i32"},
        constexprs={"PARTS": 8},
        divisible_by_16=(),
        options={"num_warps": 1},
    ),
    CompileCase(
        name="keep drafts",
        module="atom.spec_decode.mtp_triton",
        kernel="keep_drafts_kernel",
        signature={"token_table": "*i64", "state_slots": "*i32", "ids": "*i64"}
        | {"spare": "i32", "ids_row": "i32"},
        constexprs={"K": 3, "WIDE": 4},
        divisible_by_16=(),
        options={"num_warps": 1},
    ),
]
