"""Continuous batching without tensors: KV blocks, prefix cache, batch formation, policies."""
