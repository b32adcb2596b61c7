"""The passes over the vocabulary, in Triton: filter thresholds, and each row's token in parts.

References: :func:`atom.spec_decode.sampling.thresholds_reference` and ``draw``. A row is cut into
chunks of a fixed size, so that its result does not depend on how many rows there are.
"""

from __future__ import annotations

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

from atom.spec_decode.random_numbers import LANES, Purpose
from atom.spec_decode.sampling import COLDEST
from atom.transfer.payload import epoch_tag, open_tag

#: entries of the vocabulary that one program reads; a multiple of four times LANES
CHUNK = 8 * LANES
_COLDEST = tl.constexpr(COLDEST)
_TARGET = tl.constexpr(int(Purpose.TARGET))
_LANES = tl.constexpr(LANES)
_CHUNK = tl.constexpr(CHUNK)
#: bits between the tag of a finished payload and of an open one
_OPENING = tl.constexpr(epoch_tag(0) ^ open_tag(0))
#: larger than any entry's number
NO_ENTRY = tl.constexpr(2**31 - 1)


@triton.jit
def _ordered_key(value):
    """Float32 as uint32 in the same order; minus infinity is 0x007FFFFF."""
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _from_key(key):
    bits = tl.where(key >> 31 != 0, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load_usable(row, offsets, vocabulary):
    value = tl.load(row + offsets, mask=offsets < vocabulary, other=float("-inf")).to(tl.float32)
    # what is not a number is never drawn
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _weight_from(
    row, vocabulary, lowest, highest, heat, keys, COUNT: tl.constexpr, WIDTH: tl.constexpr
):
    """Weight of the entries at and above each of ``keys`` (uint32 [16]) and ``lowest``.

    The weight of an entry is 1 if ``COUNT``, else its probability up to a factor.
    """
    total = tl.zeros((16,), dtype=tl.float32)
    for start in range(0, vocabulary, WIDTH):
        offsets = start + tl.arange(0, WIDTH)
        value = _load_usable(row, offsets, vocabulary)
        key = _ordered_key(value)
        weight = tl.full((WIDTH,), 1.0, tl.float32)
        if not COUNT:
            weight = tl.exp((value - highest) / heat)
        weight = tl.where((offsets < vocabulary) & (key >= lowest), weight, 0.0)
        above = key[:, None] >= keys[None, :]
        total += tl.sum(tl.where(above, weight[:, None], 0.0), axis=0)
    return total


@triton.jit
def _largest_key(
    row, vocabulary, lowest, highest, heat, wanted, COUNT: tl.constexpr, WIDTH: tl.constexpr
):
    """The largest key at and above which the entries weigh ``wanted`` or more, a digit at a time.

    ``lowest`` if no key does.
    """
    found = tl.full((), 0, tl.uint32)
    digits = tl.arange(0, 16)
    # not unrolled: the body is long
    for place in range(0, 32, 4):
        step = (tl.full((), 28, tl.int32) - place).to(tl.uint32)
        keys = found | (digits.to(tl.uint32) << step)
        total = _weight_from(row, vocabulary, lowest, highest, heat, keys, COUNT, WIDTH)
        # total falls with the digit; digit 0 holds by the digits before
        digit = tl.max(tl.where(total >= wanted, digits, 0), axis=0)
        found = found | (digit.to(tl.uint32) << step)
    return tl.maximum(found, lowest)


@triton.jit
def threshold_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    query_start_loc,
    threshold,
    stride,
    vocabulary,
    K: tl.constexpr,
    BY_REQUEST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Program ``i``: threshold of row ``i``, or of a request's row if ``BY_REQUEST``."""
    program = tl.program_id(0)
    request = program
    row = program
    used = True
    if BY_REQUEST:
        request = program // (K + 1)
        row = tl.load(query_start_loc + request) + program % (K + 1)
        used = row < tl.load(query_start_loc + request + 1)
    if used:
        k = tl.load(top_k + request)
        p = tl.load(top_p + request)
        heat = tl.load(temperature + request)
        result = float("-inf")
        # a greedy row asks nobody
        if ((k > 0) | (p < 1.0)) & (heat >= _COLDEST):
            base = logits + row.to(tl.int64) * stride
            best = tl.full((WIDTH,), float("-inf"), tl.float32)
            for start in range(0, vocabulary, WIDTH):
                best = tl.maximum(best, _load_usable(base, start + tl.arange(0, WIDTH), vocabulary))
            highest = tl.max(best, axis=0)
            lowest = _ordered_key(tl.full((), float("-inf"), tl.float32))
            if (k > 0) & (k < vocabulary):
                lowest = _largest_key(
                    base, vocabulary, lowest, highest, heat, k.to(tl.float32), True, WIDTH
                )
            if p < 1.0:
                keys = tl.full((16,), 0, tl.uint32)
                whole = tl.max(
                    _weight_from(base, vocabulary, lowest, highest, heat, keys, False, WIDTH),
                    axis=0,
                )
                lowest = _largest_key(
                    base, vocabulary, lowest, highest, heat, p * whole, False, WIDTH
                )
            # a share of nothing still keeps the highest
            result = _from_key(tl.minimum(lowest, _ordered_key(highest)))
        tl.store(threshold + row, result)


def row_thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The Triton side of ``thresholds_reference``; same arguments, all of rows."""
    threshold = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        threshold_kernel[(logits.shape[0],)](
            logits,
            temperature,
            top_k,
            top_p,
            top_k,
            threshold,
            logits.stride(0),
            logits.shape[1],
            K=0,
            BY_REQUEST=False,
            WIDTH=1024,
            num_warps=8,
        )
    return threshold


@triton.jit
def _gumbel(word):
    number = tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    # 1 - number would round a small number away, and an entry of no weight could win
    series = number * (1.0 + number * (0.5 + number * (1.0 / 3.0)))
    return -tl.log(tl.where(number < 2.0**-8, series, -tl.log(1.0 - number)))


@triton.jit
def _better(best, entry, score, offsets):
    """Elementwise: keep the earlier of two equal scores."""
    wins = (score > best) | ((score == best) & (offsets < entry))
    return tl.where(wins, score, best), tl.where(wins, offsets, entry)


@triton.jit
def write_tags(raw, last_word, tag):
    """Both tags of a payload: its first eight bytes and those at ``last_word``."""
    words = raw.to(tl.pointer_type(tl.int64))
    tl.store(words, tag.to(tl.int64))
    tl.store(words + last_word, tag.to(tl.int64))


@triton.jit(
    do_not_specialize=[
        "parts",
        "status_last",
        "ids_last",
        "logprobs_last",
        "status_tag",
        "ids_tag",
        "logprobs_tag",
    ]
)
def row_part_kernel(
    logits,
    temperature,
    seed,
    positions,
    threshold,
    query_start_loc,
    part_score,
    part_entry,
    part_highest,
    part_sum,
    status_raw,
    ids_raw,
    logprobs_raw,
    stride,
    vocabulary,
    parts,
    status_last,
    ids_last,
    logprobs_last,
    status_tag,
    ids_tag,
    logprobs_tag,
    K: tl.constexpr,
    ALL_GREEDY: tl.constexpr,
    FILTERED: tl.constexpr,
    LOGPROBS: tl.constexpr,
    OPENS: tl.constexpr,
):
    """One chunk of one row: its best entry and, for log probabilities, its share of the sum.

    Program ``(request * (1 + K) + offset, chunk)``; results at ``[request, offset, chunk]``. With
    ``OPENS`` it also opens the payloads that a later launch fills: a launch of its own would only
    do that.
    """
    program = tl.program_id(0)
    chunk = tl.program_id(1)
    if OPENS:  # noqa: SIM102
        if program + chunk == 0:
            write_tags(status_raw, status_last, status_tag ^ _OPENING)
            write_tags(ids_raw, ids_last, ids_tag ^ _OPENING)
            if LOGPROBS:
                write_tags(logprobs_raw, logprobs_last, logprobs_tag ^ _OPENING)
    request = program // (K + 1)
    offset = program % (K + 1)
    row = tl.load(query_start_loc + request) + offset
    if row < tl.load(query_start_loc + request + 1):
        base = logits + row.to(tl.int64) * stride
        heat = 0.0
        lowest = float("-inf")
        if not ALL_GREEDY:
            heat = tl.load(temperature + request)
            if FILTERED:
                lowest = tl.load(threshold + row)
        lane = tl.arange(0, _LANES)
        best = tl.full((_LANES,), float("-inf"), tl.float32)
        entry = tl.full((_LANES,), NO_ENTRY, tl.int32)
        highest = tl.full((_LANES,), float("-inf"), tl.float32)
        total = tl.zeros((_LANES,), tl.float32)
        for group in tl.static_range(_CHUNK // (4 * _LANES)):
            start = chunk * _CHUNK + group * 4 * _LANES
            o0 = start + lane
            o1 = o0 + _LANES
            o2 = o1 + _LANES
            o3 = o2 + _LANES
            x0 = tl.load(base + o0, mask=o0 < vocabulary, other=float("-inf")).to(tl.float32)
            x1 = tl.load(base + o1, mask=o1 < vocabulary, other=float("-inf")).to(tl.float32)
            x2 = tl.load(base + o2, mask=o2 < vocabulary, other=float("-inf")).to(tl.float32)
            x3 = tl.load(base + o3, mask=o3 < vocabulary, other=float("-inf")).to(tl.float32)
            if LOGPROBS:
                new = tl.maximum(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), highest)
                # both are minus infinity behind the vocabulary's end
                safe = tl.where(new == float("-inf"), 0.0, new)
                total = total * tl.exp(highest - safe)
                total += tl.exp(x0 - safe) + tl.exp(x1 - safe)
                total += tl.exp(x2 - safe) + tl.exp(x3 - safe)
                highest = new
            x0 = tl.where(x0 == x0, x0, float("-inf"))
            x1 = tl.where(x1 == x1, x1, float("-inf"))
            x2 = tl.where(x2 == x2, x2, float("-inf"))
            x3 = tl.where(x3 == x3, x3, float("-inf"))
            # two conditions: the first is known when the kernel is compiled
            if not ALL_GREEDY:  # noqa: SIM102
                if heat >= _COLDEST:
                    position = tl.load(positions + request) + offset
                    low = (position & 0xFFFFFFFF).to(tl.uint32)
                    high = (position >> 32).to(tl.uint32)
                    index = (start // 4 + lane).to(tl.uint32)
                    zero = index * 0
                    w0, w1, w2, w3 = tl.philox(
                        tl.load(seed + request), index, zero + low, zero + _TARGET, zero + high
                    )
                    x0 = tl.where(x0 >= lowest, x0, float("-inf")) / heat + _gumbel(w0)
                    x1 = tl.where(x1 >= lowest, x1, float("-inf")) / heat + _gumbel(w1)
                    x2 = tl.where(x2 >= lowest, x2, float("-inf")) / heat + _gumbel(w2)
                    x3 = tl.where(x3 >= lowest, x3, float("-inf")) / heat + _gumbel(w3)
            best, entry = _better(best, entry, x0, o0)
            best, entry = _better(best, entry, x1, o1)
            best, entry = _better(best, entry, x2, o2)
            best, entry = _better(best, entry, x3, o3)
        top = tl.max(best, axis=0)
        at = program * parts + chunk
        tl.store(part_score + at, top)
        tl.store(part_entry + at, tl.min(tl.where(best == top, entry, NO_ENTRY), axis=0))
        if LOGPROBS:
            peak = tl.max(highest, axis=0)
            safe_peak = tl.where(peak == float("-inf"), 0.0, peak)
            tl.store(part_highest + at, peak)
            tl.store(part_sum + at, tl.sum(total * tl.exp(highest - safe_peak), axis=0))
