"""What a request holds while it runs: KV blocks, a group of recurrent slots, a prefix to resume.

A prefix is usable only up to a boundary at which all KV blocks and a state checkpoint exist: a
gated-delta-net layer has no per-token state to resume from elsewhere.

A block or group that other work still reads (a store into a host pool) is pinned; freeing it then
takes effect with the last unpin.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Numbers
from dataclasses import dataclass

from atom.errors import BadInput
from atom.model_engine.prefix_cache import BlockPool, CacheFault, CheckpointPool, extend_hashes
from atom.model_engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The part of a prompt that need not be computed.

    Attributes:
        num_tokens: tokens up to the checkpoint; 0 for none.
        blocks: their KV blocks.
        checkpoint: slot of the state behind them; ``None`` for none.
        newest_step: newest step that published any of it.
        branch_tokens: last boundary of the KV that was found beyond the checkpoint; 0 for none.
            A checkpoint there serves the next prompt that parts from this one at the same place.
    """

    num_tokens: int = 0
    blocks: tuple[int, ...] = ()
    checkpoint: int | None = None
    newest_step: int = 0
    branch_tokens: int = 0


NO_HIT = PrefixHit()


class BlockManager:
    """Accounts for KV blocks, state groups and state checkpoints. Owns no memory.

    Args:
        num_blocks: KV blocks of the pool.
        block_size: tokens a block.
        num_groups: state groups, one a running request. Each is 1 + draft tokens recurrent slots.
        num_checkpoints: checkpoint slots; 0 turns the prefix cache off.
        checkpoint_spacing: tokens between the boundaries at which a checkpoint may stand; a
            multiple of ``block_size``. ``None`` is one block.
        prefix_caching: whether prompts are looked up and published.

    Raises:
        BadInput: a size is not positive, or the spacing is no multiple of the block size.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_groups: int,
        *,
        num_checkpoints: int = 0,
        checkpoint_spacing: int | None = None,
        prefix_caching: bool = True,
    ) -> None:
        for name, value, least in (
            ("num_blocks", num_blocks, 1),
            ("block_size", block_size, 1),
            ("num_groups", num_groups, 1),
            ("num_checkpoints", num_checkpoints, 0),
        ):
            if value < least:
                raise BadInput(f"{name}: expected {least} or more, got {value}")
        spacing = block_size if checkpoint_spacing is None else checkpoint_spacing
        if spacing < 1 or spacing % block_size:
            raise BadInput(
                f"checkpoint_spacing: expected a multiple of the block size {block_size}, "
                f"got {spacing}"
            )
        self.block_size = block_size
        self.checkpoint_spacing = spacing
        self.prefix_caching = prefix_caching and num_checkpoints > 0
        self.blocks = BlockPool(num_blocks)
        self.checkpoints = CheckpointPool(num_checkpoints)
        self.num_groups = num_groups
        self._free_groups = list(range(num_groups - 1, -1, -1))
        self._group_holds = [0] * num_groups
        #: grows with every publication: a failed look-up need not be repeated until it does
        self.publications = 0

    # -- accounts
    @property
    def num_blocks(self) -> int:
        """KV blocks of the pool."""
        return self.blocks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that can be given, cached ones included."""
        return self.blocks.num_free

    @property
    def num_free_groups(self) -> int:
        """State groups that nothing holds."""
        return len(self._free_groups)

    def blocks_for(self, num_tokens: int) -> int:
        """KV blocks that so many tokens need."""
        return -(-num_tokens // self.block_size)

    # -- the prefix cache
    def find_hit(self, seq: Sequence) -> PrefixHit:
        """The longest prefix to resume from that leaves a token to compute. Changes no account."""
        if not self.prefix_caching:
            return NO_HIT
        size, spacing = self.block_size, self.checkpoint_spacing
        hashes, find = seq.block_hashes, self.blocks.find
        found: list[int] = []
        for number in range((seq.num_tokens - 1) // size):
            if number == len(hashes):
                extend_hashes(hashes, seq.token_ids, size, number + 1, seq.cache_salt)
            block = find(hashes[number])
            if block is None:
                break
            found.append(block)
        a_boundary = spacing // size
        last = len(found) // a_boundary
        for boundary in range(last, 0, -1):
            count = boundary * a_boundary
            slot = self.checkpoints.find(hashes[count - 1])
            if slot is not None:
                blocks = tuple(found[:count])
                steps = map(self.blocks.published_step, blocks)
                newest = max(self.checkpoints.published_step(slot), *steps)
                branch = last * spacing if last > boundary else 0
                return PrefixHit(boundary * spacing, blocks, slot, newest, branch)
        return PrefixHit(branch_tokens=last * spacing)

    def resume(self, seq: Sequence, num_tokens: int, spare: int) -> PrefixHit | None:
        """The prefix that a request at the head of the queue goes on from.

        Args:
            seq: the request.
            num_tokens: tokens that it needs blocks for.
            spare: blocks that have to stay free beside.

        Returns:
            The hit; ``None`` while a lower tier brings some of it: ask again, let others run.
        """
        return self.find_hit(seq)

    def look_ahead(self, waiting: Numbers[Sequence]) -> None:
        """The head of the queue cannot be admitted now: a lower tier may see to those behind."""

    def block_hash_at(self, seq: Sequence, num_tokens: int) -> bytes:
        """Hash of the block that ends at ``num_tokens``, a multiple of the block size."""
        count = num_tokens // self.block_size
        extend_hashes(seq.block_hashes, seq.token_ids, self.block_size, count, seq.cache_salt)
        return seq.block_hashes[count - 1]

    def has_checkpoint(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether the state behind the first ``num_tokens``, a boundary, is published."""
        return self.checkpoints.find(self.block_hash_at(seq, num_tokens)) is not None

    def publish(self, seq: Sequence, num_tokens: int, step: int) -> None:
        """Let the full blocks of the first ``num_tokens`` be hit, as work of ``step``."""
        if not self.prefix_caching:
            return
        # also of a block that it only begins: a later step publishes it
        seq.publish_step = step
        count = num_tokens // self.block_size
        if count <= seq.num_published_blocks:
            return
        extend_hashes(seq.block_hashes, seq.token_ids, self.block_size, count, seq.cache_salt)
        for number in range(seq.num_published_blocks, count):
            self.blocks.publish(seq.block_table[number], seq.block_hashes[number], step)
        seq.num_published_blocks = count
        self.publications += 1

    def publish_checkpoint(self, slot: int, block_hash: bytes, step: int) -> None:
        """Let a reserved checkpoint be hit, as work of ``step``."""
        self.checkpoints.publish(slot, block_hash, step)
        self.publications += 1

    def withdraw_since(self, step: int) -> tuple[int, int]:
        """Take back what ``step`` and later ones published: no later look-up finds it.

        Blocks in use lose their hash and stay with their owners, free ones become empty,
        checkpoints vanish.

        Returns:
            Blocks and checkpoints that were withdrawn.
        """
        return self.blocks.withdraw_since(step), self.checkpoints.withdraw_since(step)

    def tier_stats(self) -> dict[str, float]:
        """Counts of the tier below, by name; empty without one."""
        return {}

    def close(self) -> None:
        """Wait for what the tier below has queued."""

    # -- what a request holds
    def least_needed(self, num_tokens: int, hit: PrefixHit) -> int:
        """Free blocks without which :meth:`can_allocate` is false, whoever shares the hit."""
        return self.blocks_for(num_tokens) - len(hit.blocks)

    def can_allocate(self, num_tokens: int, hit: PrefixHit, *, spare: int = 0) -> bool:
        """Whether a group and blocks for ``num_tokens`` are free, with ``spare`` blocks left."""
        if not self._free_groups:
            return False
        needed = self.least_needed(num_tokens, hit) + spare
        free = self.blocks.num_free
        return needed <= free and needed <= free - self.blocks.count_free(hit.blocks)

    def allocate(self, seq: Sequence, num_tokens: int, hit: PrefixHit = NO_HIT) -> None:
        """Give a request its group and blocks, and set it to go on behind the hit.

        The checkpoint of the hit stays pinned until :meth:`restored`.

        Raises:
            CacheFault: it holds something already, or not enough is free.
        """
        if seq.state_group is not None or seq.block_table:
            raise CacheFault(f"request {seq.request_id} holds blocks or a group already")
        if not self.can_allocate(num_tokens, hit):
            raise CacheFault(f"request {seq.request_id} does not fit: check can_allocate before")
        self.blocks.share(hit.blocks)
        seq.block_table = [*hit.blocks, *self.blocks.take(self.least_needed(num_tokens, hit))]
        if hit.checkpoint is not None:
            self.checkpoints.pin(hit.checkpoint)
        group = self._free_groups.pop()
        self._group_holds[group] = 1
        seq.state_group = group
        seq.restore_slot = hit.checkpoint
        seq.num_computed_tokens = hit.num_tokens
        seq.num_published_blocks = len(hit.blocks)
        seq.cache_step = hit.newest_step
        seq.branch_tokens = hit.branch_tokens

    def restored(self, seq: Sequence) -> None:
        """The copy out of its checkpoint is queued: later saves are ordered behind it."""
        if seq.restore_slot is not None:
            self.checkpoints.unpin(seq.restore_slot)
            seq.restore_slot = None

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Bring a request's block table to ``num_tokens``; False, and nothing done, if it cannot.

        The blocks it gets are its own: shared ones are full, and full ones are not written.
        """
        missing = self.blocks_for(num_tokens) - len(seq.block_table)
        if missing <= 0:
            return True
        if missing > self.blocks.num_free:
            return False
        seq.block_table += self.blocks.take(missing)
        return True

    def free(self, seq: Sequence) -> None:
        """Take all that a request holds. Pinned blocks and groups follow with their last unpin."""
        self.restored(seq)
        self.blocks.release(seq.block_table)
        seq.block_table = []
        if seq.state_group is not None:
            self.unpin_group(seq.state_group)
            seq.state_group = None
        seq.num_computed_tokens = 0
        seq.num_published_blocks = 0
        seq.cache_step = 0
        seq.publish_step = 0
        seq.branch_tokens = 0

    # -- pins of work that outlives its request
    def pin_blocks(self, blocks: Iterable[int]) -> None:
        """Keep blocks from being given to another request while work still reads them.

        Raises:
            CacheFault: a block is free and empty.
        """
        self.blocks.share(blocks)

    def unpin_blocks(self, blocks: Numbers[int]) -> None:
        """Drop a pin from each block.

        Raises:
            CacheFault: a block has neither pin nor owner.
        """
        self.blocks.release(blocks)

    def pin_group(self, group: int) -> None:
        """Keep a held state group from being given to another request.

        Raises:
            CacheFault: nothing holds it.
        """
        if not self._group_holds[group]:
            raise CacheFault(f"state group {group} is free: nothing to pin")
        self._group_holds[group] += 1

    def unpin_group(self, group: int) -> None:
        """Drop a hold of a state group; it is free with the last.

        Raises:
            CacheFault: nothing holds it.
        """
        if not self._group_holds[group]:
            raise CacheFault(f"state group {group} was freed twice")
        self._group_holds[group] -= 1
        if not self._group_holds[group]:
            self._free_groups.append(group)
