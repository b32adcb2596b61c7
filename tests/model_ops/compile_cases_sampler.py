"""The rejection sampler's kernels, as launches with three drafts specialise them."""

from __future__ import annotations

from typing import Any

from compile_case import CompileCase

_VOCABULARY = {"logits": "*bf16", "stride": "i32", "vocabulary": "i32"}
_SETTINGS = {"temperature": "*fp32", "seed": "*i64", "positions": "*i64"}
_PAYLOADS = {
    "status_raw": "*u8",
    "ids_raw": "*u8",
    "logprobs_raw": "*u8",
    "status_last": "i32",
    "ids_last": "i32",
    "logprobs_last": "i32",
    "status_tag": "i64",
    "ids_tag": "i64",
    "logprobs_tag": "i64",
}
_JUDGED = {
    "logits": "*bf16",
    "query_start_loc": "*i32",
    "draft_ids": "*i64",
    "num_drafts": "*i32",
    "forced_bonus": "*i32",
    "part_score": "*fp32",
    "part_entry": "*i32",
    "part_highest": "*fp32",
    "part_sum": "*fp32",
    "stride": "i32",
    "draft_stride": "i32",
    "parts": "i32",
}
_PARTS = {
    **_VOCABULARY,
    **_SETTINGS,
    "threshold": "*fp32",
    "query_start_loc": "*i32",
    "part_score": "*fp32",
    "part_entry": "*i32",
    "part_highest": "*fp32",
    "part_sum": "*fp32",
    "parts": "i32",
    **_PAYLOADS,
}
_VERDICT = {
    **_JUDGED,
    "num_rejected": "*i32",
    "num_bonus": "*i32",
    "sampled_ids": "*i64",
    "next_token": "*i64",
    "logprobs": "*fp32",
}
_OUTPUTS = {
    **_JUDGED,
    **_PAYLOADS,
    "record": "*i32",
    "state_slots": "*i32",
    "token_table": "*i64",
    "num_bonus": "*i32",
    "kept_ids": "*i64",
    "requests": "i32",
}
_SHAPE = {"K": 3, "WIDTH": 4, "PARTS": 32}


def _case(
    name: str, kernel: str, signature: dict[str, str], constants: dict[str, Any], warps: int
) -> CompileCase:
    place = "sampling" if kernel in ("row_part_kernel", "threshold_kernel") else "rejection_sampler"
    module = f"atom.spec_decode.{place}_triton"
    # a view of a payload begins 8 bytes behind its block
    loose = ("num_rejected", "num_bonus", "sampled_ids", "logprobs")
    aligned = tuple(n for n, kind in signature.items() if kind[0] == "*" and n not in loose)
    return CompileCase(
        f"sampler: {name}", module, kernel, signature, constants, aligned, {"num_warps": warps}
    )


CASES = [
    _case(
        f"row parts, {word}",
        "row_part_kernel",
        _PARTS,
        {"K": 3, "ALL_GREEDY": greedy, "FILTERED": filtered, "LOGPROBS": True, "OPENS": greedy},
        4,
    )
    for word, greedy, filtered in (
        ("greedy", True, False),
        ("warm", False, False),
        ("filtered", False, True),
    )
]
CASES += [
    _case(
        "thresholds of requests",
        "threshold_kernel",
        {
            **_VOCABULARY,
            "temperature": "*fp32",
            "top_k": "*i32",
            "top_p": "*fp32",
            "query_start_loc": "*i32",
            "threshold": "*fp32",
        },
        {"K": 3, "BY_REQUEST": True, "WIDTH": 1024},
        8,
    ),
    _case(
        "verdict",
        "verdict_kernel",
        _VERDICT,
        {**_SHAPE, "FORCED": False, "LOGPROBS": True},
        1,
    ),
    _case(
        "outputs",
        "outputs_kernel",
        _OUTPUTS,
        {**_SHAPE, "WORDS": 8, "FORCED": False, "LOGPROBS": True, "TAGGED": True},
        1,
    ),
    _case(
        "outputs, forced and untagged",
        "outputs_kernel",
        _OUTPUTS,
        {**_SHAPE, "WORDS": 8, "FORCED": True, "LOGPROBS": False, "TAGGED": False},
        1,
    ),
]
CASES.append(
    CompileCase(
        "sampler: ell",
        "atom.spec_decode.dspark_triton",
        "ell_kernel",
        {
            "confidence": "*fp32",
            "ell": "*i32",
            "tags": "*i64",
            "threshold": "fp32",
            "tag": "i64",
            "stride": "i32",
            "tags_stride": "i32",
            "requests": "i32",
        },
        {"K": 3, "ROWS": 128, "TAGGED": True},
        ("confidence", "tags"),
        {"num_warps": 4},
    )
)
