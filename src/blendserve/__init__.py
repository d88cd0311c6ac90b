"""Offline LLM inference with resource-aware batching."""

import logging

__version__ = "0.1.0"

# Events are for whoever asks for them (`run --log-file`), not for stderr.
logging.getLogger(__name__).addHandler(logging.NullHandler())
