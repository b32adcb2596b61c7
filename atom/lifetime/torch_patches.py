"""Host edges and graphs that no callback of torch tells: patched while the sanitizer is on."""

from __future__ import annotations

import threading
from typing import Any

import torch

from atom.lifetime.host_watch import put_back, replace
from atom.lifetime.sites import CALLERS, here
from atom.lifetime.torch_front import TorchFront, started_threads


class TorchPatches:
    """Patches of ``Event.query``, ``Stream.query``, ``CUDAGraph`` and ``Thread.start``.

    Args:
        front: what they feed.
    """

    def __init__(self, front: TorchFront) -> None:
        self._front = front
        self._done: list[tuple[type, str, Any]] = []

    def apply(self) -> None:
        """Patch until :meth:`restore`."""
        replace(self._done, threading.Thread, "start", started_threads(self._front.mode))
        classes = self._front.layer.patches()
        if classes is None:
            return
        event, stream, graph = classes
        self._patch_events(event)
        self._patch_streams(stream)
        self._patch_graphs(graph)
        # asking whether CUDA is there would start the driver, which forked children cannot use
        self._patch_empty_cache()

    def restore(self) -> None:
        """Undo all."""
        put_back(self._done)

    def _patch_events(self, event: Any) -> None:
        front = self._front
        query, elapsed_time = event.query, event.elapsed_time

        def watched_query(self: Any) -> bool:
            done = query(self)
            if done:
                front._event_observed(self.cuda_event)
            return bool(done)

        def watched_elapsed_time(self: Any, end_event: Any) -> float:
            # it raises unless both have completed
            elapsed = elapsed_time(self, end_event)
            front._event_observed(self.cuda_event)
            front._event_observed(end_event.cuda_event)
            return float(elapsed)

        replace(self._done, event, "query", watched_query)
        replace(self._done, event, "elapsed_time", watched_elapsed_time)

    def _patch_streams(self, stream: Any) -> None:
        front = self._front
        query = stream.query

        def watched_query(self: Any) -> bool:
            done = query(self)
            if done:
                front.do(front.observe_stream, front.layer.stream_key(self))
            return bool(done)

        replace(self._done, stream, "query", watched_query)

    def _patch_graphs(self, graph: Any) -> None:
        front = self._front
        begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

        def watched_begin(self: Any, *arguments: Any, **options: Any) -> None:
            begin(self, *arguments, **options)
            front.captured = []

        def watched_end(self: Any) -> None:
            accesses, front.captured = front.captured, None
            end(self)
            unique = {(a[0].base, *a[1:4]): a for a in accesses or ()}
            self._watched_accesses = list(unique.values())

        def watched_replay(self: Any) -> None:
            replay(self)
            accesses = getattr(self, "_watched_accesses", None)
            if accesses is None:
                front.monitor.report.note(
                    "a graph was captured before the sanitizer started: its replays are not seen"
                )
                return
            layer = front.layer
            stream = layer.current_stream(layer.current_device())
            front.do(front.replayed, accesses, stream, here(CALLERS))

        replace(self._done, graph, "capture_begin", watched_begin)
        replace(self._done, graph, "capture_end", watched_end)
        replace(self._done, graph, "replay", watched_replay)

    def _patch_empty_cache(self) -> None:
        front = self._front
        empty_cache = torch.cuda.empty_cache

        def watched_empty_cache() -> None:
            before = front.layer.reserved()
            empty_cache()
            if front.layer.reserved() < before:
                # memory goes back to the driver only behind a wait for the device
                front._device_waited()

        replace(self._done, torch.cuda, "empty_cache", watched_empty_cache)
        replace(self._done, torch.cuda.memory, "empty_cache", watched_empty_cache)
