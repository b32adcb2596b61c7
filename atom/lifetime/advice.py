"""The smallest change that closes a missing edge, in words."""

from __future__ import annotations

from atom.lifetime.findings import Kind, Site, Use


def fix_for(
    kind: Kind,
    first: Use,
    second: Use | None,
    owner_stream: str,
    recorded_at: Site | None,
    *,
    pinned: bool = False,
) -> str:
    """What to change.

    Args:
        kind: what was seen.
        first: the earlier use.
        second: the later use.
        owner_stream: the stream that owns the block.
        recorded_at: an event that was recorded behind the first use, if any.
        pinned: the block is pinned host memory.
    """
    event = (
        f"the event recorded at {recorded_at}"
        if recorded_at is not None and recorded_at.file
        else f"an event recorded on {first.stream} behind it"
    )
    where = "it" if second is None else str(second.site)
    if kind is Kind.FREED_IN_USE:
        if pinned:
            return (
                f"keep the pinned tensor until the host has waited on {event}: the pinned "
                "allocator guards copies, not kernels"
            )
        return (
            f"keep a reference to the tensor beside {event}, and drop it after the host has "
            f"waited on that event (or let {owner_stream} wait for it before the drop; or "
            f"call tensor.record_stream for {first.stream})"
        )
    if kind is Kind.REUSE_RACE:
        waiting = second.stream if second is not None else "the next user"
        return (
            f"let {waiting} wait for {first.stream} after the allocation and before {where}: the "
            "bytes come from a block whose last owner's work may still run; record_stream and "
            "holding cannot help"
        )
    if kind in (Kind.LIVE_OVERWRITE, Kind.UNORDERED_WRITES):
        waiting = second.stream if second is not None else "the writer"
        return (
            f"let {waiting} wait on {event} before {where}: the buffer lives on, so holding it "
            "does nothing"
        )
    if kind is Kind.READ_TOO_EARLY:
        waiting = second.stream if second is not None else "the reader"
        return f"let {waiting} wait for {first.stream} (wait_stream, or {event}) before {where}"
    if kind is Kind.HOST_READ_TOO_EARLY:
        return f"let the host wait on {event} (synchronize, or query until true) before {where}"
    return (
        f"let the host wait on {event} before it writes the pinned buffer again at {where}, or "
        "take another buffer"
    )
