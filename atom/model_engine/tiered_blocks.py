"""A block manager with a host pool below: prefixes are looked for on the device, then in the pool.

What is computed is stored: full chunks of a prompt as the step that filled their last block is
published, and a state with its checkpoint. A chunk that the pool has lost since is stored again
when a prompt that holds it on the device goes through; its state only where they are paired, since
otherwise nobody tells who keeps the states that one is gone.

What the pool has of a prompt comes back as if it had been computed: loaded blocks and checkpoints
are published, and the request hits them. While its load is on its way a request waits and others
run, and loads of the next ones in the queue begin; if nothing else can run it is admitted, and the
default stream waits for the load. A load that
cannot be is no error: the request computes what is missing, and the cause is counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Numbers
from itertools import islice

from atom.errors import DeviceOutOfMemory
from atom.kv_transfer.host_pool import Entry, EntryKind, HostPool, PoolKey, PoolPolicy, Refusal
from atom.kv_transfer.offload import ChunkCopy, Offload, StateCopy
from atom.kv_transfer.tier_counts import Cause, TierCounts
from atom.model_engine.block_manager import NO_HIT, BlockManager, PrefixHit
from atom.model_engine.sequence import Sequence
from atom.model_engine.tier_lookup import Found, Load, look_up

#: waiting requests behind the head whose loads may begin
_LOOK_AHEAD = 4


class TieredBlockManager(BlockManager):
    """See the module's text and :class:`BlockManager`.

    Args:
        offload: moves the bytes.
        pool: accounts for the host's memory; its entries' places are kept here.
        chunk_tokens: tokens of a chunk; a multiple of the block size that divides the spacing.

    Other arguments are those of :class:`BlockManager`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_groups: int,
        *,
        num_checkpoints: int,
        checkpoint_spacing: int,
        chunk_tokens: int,
        offload: Offload,
        pool: HostPool,
    ) -> None:
        super().__init__(
            num_blocks,
            block_size,
            num_groups,
            num_checkpoints=num_checkpoints,
            checkpoint_spacing=checkpoint_spacing,
        )
        self.offload = offload
        self.pool = pool
        pool.on_evict = offload.memory.give
        self.chunk_blocks = chunk_tokens // block_size
        self.tier_counts = TierCounts()
        self._loads: dict[int, Load] = {}
        self._landing: list[Load] = []
        self._failures: dict[int, list[tuple[EntryKind, Cause]]] = {}
        #: per running request: the next chunk to look at; paired: digest of where it resumed
        self._next_chunk: dict[int, int] = {}
        self._resumed: dict[int, bytes] = {}
        #: tokens beside its own that a request needs blocks for, and blocks left free
        self._asked = (0, 0)
        #: of entries that are reserved and not queued yet
        self._planned_bytes = 0

    # -- look-up
    def resume(self, seq: Sequence, num_tokens: int, spare: int) -> PrefixHit | None:
        """See :meth:`BlockManager.resume`; ``None`` while a load is on its way."""
        self.poll()
        self._asked = (num_tokens - seq.num_tokens, spare)
        load = self._loads.get(seq.request_id)
        if load is None:
            hit = self.find_hit(seq)
            self._make_way(hit, num_tokens, spare)
            load = self._look_up_and_load(seq, hit, num_tokens, spare)
            if load is None:
                return hit
        if load.is_awaited:
            if not self._is_idle:
                return None
            # nothing else can run: what is launched now waits on the device, not here
            assert load.job is not None
            self.offload.join(load.job)
            self._publish_load(load)
        return self.find_hit(seq)

    def look_ahead(self, waiting: Numbers[Sequence]) -> None:
        """Begin loads for requests behind a head that waits for its own.

        Each is looked at once until it is the head itself. The blocks that the ones before it
        still need are left for them.
        """
        if waiting[0].request_id not in self._loads:
            return
        extra, spare = self._asked
        for seq in islice(waiting, 1, 1 + _LOOK_AHEAD):
            if seq.request_id not in self._failures:
                rest = sum(load.rest for load in self._loads.values())
                tokens = seq.num_tokens + extra
                self._look_up_and_load(seq, self.find_hit(seq), tokens, spare + rest)

    def _look_up_and_load(
        self, seq: Sequence, hit: PrefixHit, num_tokens: int, spare: int
    ) -> Load | None:
        found = look_up(self, self.pool, self.chunk_blocks, seq, hit)
        self._failures[seq.request_id] = found.failures
        if found.num_tokens <= hit.num_tokens:
            return None
        return self._begin(seq, found, num_tokens, spare)

    def _make_way(self, hit: PrefixHit, num_tokens: int, spare: int) -> None:
        """Take blocks back from loads of requests behind the head, if it needs them."""
        while self._loads and not super().can_allocate(num_tokens, hit, spare=spare):
            self._drop_a_load()

    def awaits_load(self, seq: Sequence) -> bool:
        """Whether a waiting request has a load on its way whose end was not seen."""
        load = self._loads.get(seq.request_id)
        return load is not None and load.is_awaited

    @property
    def _is_idle(self) -> bool:
        return self.num_free_groups == self.num_groups

    # -- load
    def _begin(self, seq: Sequence, found: Found, num_tokens: int, spare: int) -> Load | None:
        """Start a load if the request would fit with it; else ``None``, and why is counted."""
        kept = PrefixHit(found.num_tokens, tuple(found.present))
        if not super().can_allocate(num_tokens, kept, spare=spare):
            return None
        slot = found.slot
        if slot is not None:
            self.checkpoints.pin(slot)
        else:
            slot = self.checkpoints.reserve()
            if slot is None:
                self._failures[seq.request_id].append((EntryKind.STATE, Cause.NO_SLOT))
                return None
        numbers = [number for _, missing in found.chunks for number in missing]
        self.blocks.share(found.present)
        targets = dict(zip(numbers, self.blocks.take(len(numbers)), strict=True))
        load = Load(found.chunks, found.state, targets, found.present, list(seq.block_hashes), slot)
        load.pinned_slot = found.state is None
        load.rest = self.least_needed(num_tokens, kept) - len(targets)
        for entry in load.entries:
            self.pool.pin(entry)
        if found.state is not None:
            # a look-up uses KV entries (see allocate), only a load uses a state: so KV that the
            # device serves for long stays young, and its state grows old
            self.pool.touch(found.state.key)
        chunks = [
            ChunkCopy(
                entry,
                tuple(targets[number] for number in missing),
                tuple(number % self.chunk_blocks for number in missing),
            )
            for entry, missing in found.chunks
        ]
        states = [] if found.state is None else [StateCopy(found.state, slot)]
        try:
            load.job = self.offload.load(chunks, states)
        except DeviceOutOfMemory:
            kind = EntryKind.KV if chunks else EntryKind.STATE
            self._failures[seq.request_id].append((kind, Cause.DEVICE))
            self._copies_ended(load)
            self._let_go(load)
            return None
        load.owner = seq.request_id
        self._loads[seq.request_id] = load
        self._landing.append(load)
        self.tier_counts.loads += 1
        return load

    def _publish_load(self, load: Load) -> None:
        """Let what was loaded be hit, under the steps that computed it."""
        load.published = True
        for entry, missing in load.chunks:
            for number in missing:
                self.blocks.publish(load.blocks[number], load.hashes[number], entry.step)
        if load.state is not None and load.slot is not None:
            digest = load.state.key.digest
            assert isinstance(digest, bytes)
            if self.checkpoints.publish(load.slot, digest, load.state.step):
                self.checkpoints.pin(load.slot)
                load.pinned_slot = True
            else:
                load.slot = None
        self.publications += 1

    def _landed(self, load: Load) -> None:
        """The host saw its end."""
        self._landing.remove(load)
        self._copies_ended(load)
        if load.is_awaited:
            self._publish_load(load)
        self.tier_counts.loaded_chunks += len(load.chunks)
        self.tier_counts.loaded_states += load.state is not None
        if load.owner is None or load.void:
            self._let_go(load)

    def _copies_ended(self, load: Load) -> None:
        load.job = None
        for entry in load.entries:
            self.pool.unpin(entry)

    def _let_go(self, load: Load) -> None:
        """Give back what a load keeps; no copy of it is under way."""
        if load.owner is not None:
            del self._loads[load.owner]
            load.owner = None
        if load.slot is not None:
            if load.pinned_slot:
                self.checkpoints.unpin(load.slot)
            else:
                self.checkpoints.cancel(load.slot)
            load.slot = None
        self.blocks.release([*load.present, *load.blocks.values()])
        load.present, load.blocks = [], {}

    def _disown(self, request_id: int) -> None:
        """Its request was admitted or ended: targets are kept only while the copy writes them."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            load.owner = None
            if load.job is None:
                self._let_go(load)

    # -- what a request holds
    def allocate(self, seq: Sequence, num_tokens: int, hit: PrefixHit = NO_HIT) -> None:
        """See :meth:`BlockManager.allocate`; also notes the prompt's use of the pool."""
        super().allocate(seq, num_tokens, hit)
        load = self._loads.get(seq.request_id)
        failures = self._failures.pop(seq.request_id, ())
        self.tier_counts.asked(failures, load is not None and load.state is not None)
        self._disown(seq.request_id)
        self._next_chunk[seq.request_id] = 0
        self.touch_prefix(seq)
        if hit.num_tokens:
            digest = seq.block_hashes[hit.num_tokens // self.block_size - 1]
            if self.pool.policy is PoolPolicy.PAIRED:
                self._resumed[seq.request_id] = digest

    def touch_prefix(self, seq: Sequence) -> None:
        """Note a use of the KV that the pool has of a prompt, as far as its hashes are known."""
        found: list[PoolKey] = []
        hashes = seq.block_hashes
        for end in range(self.chunk_blocks, len(hashes) + 1, self.chunk_blocks):
            key = PoolKey(EntryKind.KV, hashes[end - 1])
            if key not in self.pool:
                break
            found.append(key)
        # the end of a prefix goes first, as with LMCache in the process
        for key in reversed(found):
            self.pool.touch(key)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """See :meth:`BlockManager.grow`; waits for copies whose pins are in the way."""
        while not super().grow(seq, num_tokens):
            if not (self._wait_for_pins() or self._drop_a_load()):
                return False
        return True

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that can be given; with nothing running, pins of copies are waited for."""
        self.poll()
        while self._is_idle and self._wait_for_pins():
            pass
        return super().num_free_blocks

    def can_allocate(self, num_tokens: int, hit: PrefixHit, *, spare: int = 0) -> bool:
        """See :meth:`BlockManager.can_allocate`; likewise."""
        while not super().can_allocate(num_tokens, hit, spare=spare):
            if not (self._is_idle and self._wait_for_pins()):
                return False
        return True

    def _wait_for_pins(self) -> bool:
        """Wait for the oldest copy that keeps blocks and has no request any more."""
        if any(job.sources_read is not None for job in self.offload.stores):
            self.offload.wait_for_reads()
        elif any(load.owner is None for load in self._landing):
            self.offload.wait_for_load()
        else:
            return False
        self.tier_counts.pin_waits += 1
        self.poll()
        return True

    def _drop_a_load(self) -> bool:
        """Take its blocks from a request that waits: a running one needs them."""
        for number in reversed(self._loads):
            self._disown(number)
            return True
        return False

    def free(self, seq: Sequence) -> None:
        """See :meth:`BlockManager.free`."""
        super().free(seq)
        self._disown(seq.request_id)
        self._failures.pop(seq.request_id, None)
        self._next_chunk.pop(seq.request_id, None)
        self._resumed.pop(seq.request_id, None)

    # -- store
    def publish(self, seq: Sequence, num_tokens: int, step: int) -> None:
        """See :meth:`BlockManager.publish`; also stores the full chunks."""
        super().publish(seq, num_tokens, step)
        self.poll()
        a_chunk, hashes = self.chunk_blocks, seq.block_hashes
        first = self._next_chunk.get(seq.request_id, 0)
        last = num_tokens // self.block_size // a_chunk
        copies: list[ChunkCopy] = []
        for number in range(first, last):
            start, end = number * a_chunk, (number + 1) * a_chunk
            key = PoolKey(EntryKind.KV, hashes[end - 1])
            parent = hashes[start - 1] if start else None
            entry = self._reserve(key, self.offload.chunk_bytes, parent, step)
            if entry is not None:
                blocks = tuple(seq.block_table[start:end])
                copies.append(ChunkCopy(entry, blocks, tuple(range(a_chunk))))
        self._next_chunk[seq.request_id] = max(first, last)
        self._store(copies, [])
        digest = self._resumed.pop(seq.request_id, None)
        slot = None if digest is None else self.checkpoints.find(digest)
        if digest is not None and slot is not None:
            self._store_state(slot, digest, step)

    def publish_checkpoint(self, slot: int, block_hash: bytes, step: int) -> None:
        """See :meth:`BlockManager.publish_checkpoint`; also stores the state."""
        super().publish_checkpoint(slot, block_hash, step)
        if self.checkpoints.find(block_hash) == slot:
            self._store_state(slot, block_hash, step)

    def _store_state(self, slot: int, block_hash: bytes, step: int) -> None:
        key = PoolKey(EntryKind.STATE, block_hash)
        entry = self._reserve(key, self.offload.state_bytes, None, step)
        if entry is not None:
            self._store([], [StateCopy(entry, slot)])

    def _reserve(self, key: PoolKey, nbytes: int, parent: bytes | None, step: int) -> Entry | None:
        if key in self.pool:
            return None
        if not self.offload.has_room(nbytes, self._planned_bytes):
            self.tier_counts.dropped(key.kind, Cause.BACK_PRESSURE)
            return None
        entry = self.pool.reserve(key, nbytes, parent=parent, step=step)
        if isinstance(entry, Refusal):
            self.tier_counts.dropped(key.kind, Cause(entry))
            return None
        self.offload.memory.take(entry)
        self._planned_bytes += nbytes
        return entry

    def _store(self, chunks: list[ChunkCopy], states: list[StateCopy]) -> None:
        self._planned_bytes = 0
        if not chunks and not states:
            return
        # their owners may end before they are read
        for chunk in chunks:
            self.blocks.share(chunk.blocks)
        for state in states:
            self.checkpoints.pin(state.slot)
        jobs = self.offload.store(chunks, states)
        queued = sum(len(job.chunks) + len(job.states) for job in jobs)
        if queued < len(chunks) + len(states):
            stored = {entry for job in jobs for entry in job.entries}
            self._give_up(
                [chunk for chunk in chunks if chunk.entry not in stored],
                [state for state in states if state.entry not in stored],
            )

    def _give_up(self, chunks: list[ChunkCopy], states: list[StateCopy]) -> None:
        """Stores that the device had no room for."""
        self._unpin_sources(chunks, states)
        entries = [chunk.entry for chunk in chunks] + [state.entry for state in states]
        self.pool.withdraw([entry for entry in entries if not entry.withdrawn])
        for entry in entries:
            self.pool.unpin(entry)
            self.tier_counts.dropped(entry.key.kind, Cause.DEVICE)

    def _unpin_sources(self, chunks: Iterable[ChunkCopy], states: Iterable[StateCopy]) -> None:
        for chunk in chunks:
            self.blocks.release(chunk.blocks)
        for state in states:
            self.checkpoints.unpin(state.slot)

    # -- ends
    def poll(self) -> None:
        """Take note of copies that have ended. Waits for nothing."""
        offload = self.offload
        for job in offload.finished_reads():
            self._unpin_sources(job.chunks, job.states)
        for job in offload.finished_stores():
            for entry in job.entries:
                self.pool.land(entry)
            self.tier_counts.stored_chunks += len(job.chunks)
            self.tier_counts.stored_states += len(job.states)
        for job in offload.finished_loads():
            for load in [load for load in self._landing if load.job is job]:
                self._landed(load)

    def withdraw_since(self, step: int) -> tuple[int, int]:
        """See :meth:`BlockManager.withdraw_since`; the pool's entries and loads of them go too."""
        self.poll()
        found = super().withdraw_since(step)
        self.pool.withdraw_since(step)
        for load in self._landing:
            if any(entry.withdrawn for entry in load.entries) and not load.void:
                load.void = True
                for entry in load.entries:
                    if entry.withdrawn:
                        self.tier_counts.failed(entry.key.kind, Cause.WITHDRAWN)
        return found

    def tier_stats(self) -> dict[str, float]:
        """Counts by name, and what the pool holds."""
        pool, counts = self.pool, self.tier_counts.by_name()
        for kind in EntryKind:
            counts[f"pool_{kind}_entries"] = pool.kind_entries(kind)
            counts[f"pool_{kind}_bytes"] = pool.kind_bytes(kind)
            counts[f"pool_{kind}_evicted"] = pool.counts[kind].evicted
        counts["pool_bytes"] = pool.capacity_bytes
        counts["offload_stored_bytes"] = self.offload.stored_bytes
        counts["offload_loaded_bytes"] = self.offload.loaded_bytes
        return counts

    def close(self) -> None:
        """Wait for all copies."""
        self.offload.close()
