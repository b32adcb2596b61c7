"""The CPU tier: KV chunks and state images in pinned host memory, and their way there and back."""
