"""Attention of a decoding step to rows of a KV cache, in Triton; see `decode.py`."""
