"""``compute_ell`` as one launch that also writes its payload's tags."""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
import triton
import triton.language as tl
from torch import Tensor

from atom.model_ops.launch_sizes import ceil_div

_ROWS = 128


@triton.jit(do_not_specialize=["requests", "tag"])
def ell_kernel(
    confidence,
    ell,
    tags,
    threshold,
    tag,
    stride,
    tags_stride,
    requests,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    TAGGED: tl.constexpr,
):
    """Program ``i``: ``ROWS`` requests; program 0 also writes the tags."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < requests
    reach = tl.full((ROWS,), 1.0, tl.float32)
    count = tl.zeros((ROWS,), tl.int32)
    for draft in tl.static_range(K):
        reach = reach * tl.load(confidence + row * stride + draft, mask=mask, other=0.0)
        # false for what is not a number
        count = tl.where((reach >= threshold) & (count == draft), draft + 1, count)
    tl.store(ell + row, count, mask=mask)
    if TAGGED:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(tags, tag.to(tl.int64))
            tl.store(tags + tags_stride, tag.to(tl.int64))


def write_ell(
    confidence: Tensor, ell: Tensor, tags: Tensor | None, threshold: float, tag: int
) -> None:
    """The Triton side of ``compute_ell_body``."""
    requests, drafts = confidence.shape
    ell_kernel[(ceil_div(requests, _ROWS),)](
        confidence,
        ell,
        ell if tags is None else tags,
        threshold,
        tag,
        confidence.stride(0),
        0 if tags is None else tags.stride(0),
        requests,
        K=drafts,
        ROWS=_ROWS,
        TAGGED=tags is not None,
        num_warps=4,
    )
