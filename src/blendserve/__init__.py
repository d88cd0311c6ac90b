"""Offline LLM inference with resource-aware batching."""

__version__ = "0.1.0"
