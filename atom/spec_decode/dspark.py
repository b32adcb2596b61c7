"""DSpark: how sure the drafter is sizes how much of a request's next step is verified.

A draft is of use only if all before it stand. With the drafter's probability of each as confidence,
draft ``i`` is reached and stands with about the product of the first ``i`` confidences. Verifying
it costs one more row; it is verified while that product is at least a threshold, which is thus the
price of a row in tokens: 0.3 says that a row is worth spending for three tenths of a token or more.

``ell``, the drafts to verify, goes to the host over the ring of
:mod:`atom.spec_decode.dspark_verify` and is adopted a fixed number of steps later. Which step's
``ell`` a step uses is a matter of counting, never of what happens to have landed, so that every
rank of an engine decides alike.

Outputs do not change by it. Greedy drafts cannot change a text at all, see
:mod:`atom.spec_decode.rejection_sampler`. With drafts that are drawn, the drafts that are cut must
not decide on the cut: an ``ell`` taken from the very drafts that it shortens would prefer some of
them, and the text's distribution would no longer be the target's. A lag of :data:`LAG` steps keeps
them apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from atom.device.interface import Kernel
from atom.spec_decode.dspark_verify import MAX_ELL_INFLIGHT, EllRing
from atom.transfer.payload import Payload

#: an ``ell`` is adopted by the step this many steps behind the one that recorded it
LAG = 2


def compute_ell_reference(confidence: Tensor, threshold: float) -> Tensor:
    """See :func:`compute_ell`."""
    reach = confidence.to(torch.float32).cumprod(1) >= threshold
    return reach.to(torch.int32).cumprod(1).sum(1, dtype=torch.int32)


def compute_ell(confidence: Tensor, threshold: float) -> Tensor:
    """Drafts worth verifying.

    Args:
        confidence: float32 ``[S, k]``, 0 to 1, of each draft given those before it. What is not a
            number ends the run.
        threshold: least product of confidences.

    Returns:
        int32 ``[S]``, 0 to k.
    """
    if not confidence.is_cuda:
        return compute_ell_reference(confidence, threshold)
    from atom.spec_decode.dspark_triton import write_ell

    ell = torch.empty(confidence.shape[0], dtype=torch.int32, device=confidence.device)
    write_ell(confidence, ell, None, threshold, 0)
    return ell


def compute_ell_body(
    reads: Sequence[Tensor], writes: Sequence[Tensor], threshold: float, tag: int = 0
) -> None:
    """Kernel body: ``ell`` from confidences; with a second write the payload's tags as well.

    Args:
        reads: confidence float32 ``[M, k]``; the first rows are the batch.
        writes: ``ell`` int32 ``[S]``, S at most M; then, if wanted, the tags' int64 ``[2]`` view.
        threshold: see :func:`compute_ell`.
        tag: written into the tags.
    """
    ell = writes[0]
    confidence = reads[0][: ell.shape[0]]
    tags = writes[1] if len(writes) > 1 else None
    if ell.is_cuda:
        from atom.spec_decode.dspark_triton import write_ell

        write_ell(confidence, ell, tags, threshold, tag)
        return
    ell.copy_(compute_ell_reference(confidence, threshold))
    if tags is not None:
        tags.fill_(tag)


COMPUTE_ELL = Kernel("compute_ell", compute_ell_body)


class EllResolver:
    """Adopts each recorded ``ell`` a fixed number of recorded steps later.

    Call :meth:`resolve` once in front of every step and :meth:`record` once in every step that
    makes drafts. A request that no adopted ``ell`` names verifies all its drafts.

    Args:
        ring: the transport; nobody else reads it.
        lag: steps, 1 to ``MAX_ELL_INFLIGHT``. With 1 the host waits for drafts just made, and drawn
            drafts lose their exactness; see the module's text.

    Raises:
        ValueError: another lag.
    """

    def __init__(self, ring: EllRing, lag: int = LAG) -> None:
        if not 1 <= lag <= MAX_ELL_INFLIGHT:
            raise ValueError(f"lag {lag}: an ell is adopted 1 to {MAX_ELL_INFLIGHT} steps later")
        self.ring = ring
        self.lag = lag
        #: steps that nobody adopted yet, each with its values once they were taken from the ring
        self._recorded: deque[tuple[int, dict[int, int] | None]] = deque()

    def record(self, step: int, req_ids: Sequence[int], ell: Payload) -> None:
        """Send a step's ``ell``.

        Args:
            step: the step that made it, higher than any before.
            req_ids: the batch's requests, in the order of ``ell``.
            ell: filled and stamped on the default stream.

        Raises:
            EllMismatch, WrongPayload: as :meth:`EllRing.record_ell`.
            StalePayload: an earlier one, which had to be read to make room, is not its step's.
        """
        waiting = [index for index, (_, values) in enumerate(self._recorded) if values is None]
        if len(waiting) >= MAX_ELL_INFLIGHT:
            # the ring forgets older ones; the step that adopts it stays the same
            oldest, _ = self._recorded[waiting[0]]
            # what stays if the ring's is stale
            self._recorded[waiting[0]] = (oldest, {})
            self._recorded[waiting[0]] = (oldest, self.ring.wait_ell(oldest))
        self.ring.record_ell(req_ids, ell)
        self._recorded.append((step, None))

    def resolve(self) -> dict[int, int]:
        """What the coming step adopts: ``ell`` by request, empty if it is nothing new.

        Waits for the copies of what it returns, and for no other.

        Raises:
            StalePayload: an ``ell`` carries another step's tag; it is dropped.
        """
        adopted: dict[int, int] = {}
        while len(self._recorded) >= self.lag:
            step, values = self._recorded.popleft()
            adopted.update(self.ring.wait_ell(step) if values is None else values)
        return adopted

    def clear(self) -> None:
        """Forget what was recorded. The ring keeps sources until their copies have run."""
        self._recorded.clear()
        self.ring.ell_by_req = {}
