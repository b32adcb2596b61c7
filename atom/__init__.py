"""A workbook on one cross-stream use-after-free: the fault, its fix, and what the fix costs."""

import logging

__version__ = "0.1.0"

# a library logs for whoever listens: without this, its errors would go to anybody's stderr
logging.getLogger(__name__).addHandler(logging.NullHandler())
