"""The projections of a few tokens: wide, gated, and in parts."""

from __future__ import annotations

from compile_case import CompileCase


def _case(name: str, tokens: int, tile: tuple[int, ...]) -> CompileCase:
    block_n, block_k, stages, warps, parts = tile
    return CompileCase(
        name=f"projection, {name}",
        module="atom.model_ops.decode_linear_triton",
        kernel="decode_linear_kernel",
        signature={"x": "*bf16", "weight": "*bf16", "out": "*fp32" if parts > 1 else "*bf16"}
        | dict.fromkeys(("tokens", "x_row", "outputs", "inputs"), "i32"),
        constexprs={
            "BLOCK_T": tokens,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "PARTS": parts,
            "GATED": name == "gated",
        },
        divisible_by_16=("x", "weight", "out", "x_row", "outputs", "inputs"),
        options={"num_warps": warps, "num_stages": stages},
    )


CASES = [
    _case("wide", 32, (32, 128, 2, 4, 1)),
    _case("gated", 32, (32, 128, 2, 4, 1)),
    _case("in parts", 32, (32, 128, 2, 4, 4)),
    _case("of many tokens", 64, (32, 64, 2, 4, 4)),
]
