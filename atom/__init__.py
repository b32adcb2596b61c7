"""A workbook on one cross-stream use-after-free: the fault, its fix, and what the fix costs."""

__version__ = "0.1.0"
