"""How bytes reach the host safely: payloads, pinned slots, copy protocols, queues."""
