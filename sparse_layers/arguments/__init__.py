"""Checks of the arguments of masks, layers and the op, and hints for arguments of other libraries."""
