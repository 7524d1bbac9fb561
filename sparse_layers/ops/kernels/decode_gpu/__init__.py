"""A step of decoding over what it reads of a cache, in Triton; see `decode.py`."""
