"""Decoding: which keys a step reads, and the cache that keeps them."""
