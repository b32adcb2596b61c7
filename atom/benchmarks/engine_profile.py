"""Where the device's time goes in a decode step: kernels by name, no overlap counted twice.

Names of our kernels are held against the sources by a test, so that a new kernel cannot land among
``other`` in silence. Drafts use the kernels of the model: what runs between the sampler's verdict
and the next step's first kernel is theirs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from atom.benchmarks.engine_speed_rows import Category

#: first match wins
_PATTERNS: tuple[tuple[Category, str], ...] = (
    (Category.COPIES, r"^memcpy|^memset|^\[?copy"),
    (Category.DRAFTS, r"draft|likeliest|ell_kernel"),
    (Category.SAMPLER, r"verdict|outputs_kernel|row_part|threshold_kernel|sampl|argmax"),
    (Category.ELEMENTWISE, r"step_inputs|rms_?norm|layer_?norm|embed_norm|silu|sigmoid|l2_?norm"),
    (Category.CONV, r"conv1d|convolution|depthwise"),
    (Category.RECURRENT, r"delta|recurrent|gdn|chunk|recompute_w|solve_tril|wy_|cumsum|tril|scan_"),
    (
        Category.ATTENTION,
        r"attend|attention|flash|fmha|sdpa|store_kv|rope|rotary|^decode_kernel|^prefill_kernel|"
        r"join_parts",
    ),
    (
        Category.LINEAR,
        r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma|cijk_|s16816|dot_kernel",
    ),
    (Category.ELEMENTWISE, r"elementwise|reduce|cat|index|gather|scatter|softmax|fill|triton_poi"),
)
_COMPILED = tuple((category, re.compile(text, re.IGNORECASE)) for category, text in _PATTERNS)
_SAMPLER = re.compile(r"^(verdict|outputs|row_part|threshold)_kernel")
_STEP_BEGINS = re.compile(r"step_inputs|decode_inputs", re.IGNORECASE)


@dataclass(frozen=True)
class Span:
    """One kernel or copy on the device, in microseconds."""

    name: str
    start: float
    end: float


@dataclass
class Share:
    """Device time of one category, in microseconds, and its launches."""

    microseconds: float = 0.0
    launches: int = 0


def category_of(name: str) -> Category:
    """The category that a kernel's name says."""
    return next((category for category, text in _COMPILED if text.search(name)), Category.OTHER)


def shares(spans: Sequence[Span], *, has_drafts: bool) -> dict[Category, Share]:
    """Device time by category. The sum is the time in which anything ran.

    Args:
        spans: of some steps, in any order.
        has_drafts: whether the steps make drafts behind the sampler.
    """
    found: dict[Category, Share] = {
        category: Share() for category in Category if category is not Category.GAPS
    }
    end = float("-inf")
    drafting = False
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        category = category_of(span.name)
        if _STEP_BEGINS.search(span.name):
            drafting = False
        if _SAMPLER.search(span.name):
            drafting = has_drafts
        elif drafting and category is not Category.COPIES:
            category = Category.DRAFTS
        share = found[category]
        share.launches += 1
        share.microseconds += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return found


def device_spans(work: Callable[[], Any], synchronize: Callable[[], None]) -> list[Span]:
    """Run ``work`` on an accelerator under PyTorch's profiler."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        work()
        synchronize()
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in record.events() or ()
        if event.device_type == DeviceType.CUDA and not event.name.startswith("ProfilerStep")
    ]
