"""Settings of the kernels: `FwdParams` and `BwdParams`. The library chooses fields that are None."""

import dataclasses
import hashlib

from ...arguments.checks import as_int, checked, strict_kwargs


@dataclasses.dataclass(frozen=True, repr=False)
class KernelParams:
    """Fields that the forward and the backward pass share. Explicit values always win over the library's choice.

    Every implementation reads ``q_blocksize`` and ``kv_blocksize``, except `cudnn`, which has no settings. The other
    fields are those of GPU kernels. `triton` reads them, except ``blocksize_k`` and ``blocksize_heads``, which nothing
    reads yet. `hopper` has blocks of 128 and no settings, and leaves a pass with others to `triton`.
    A selection brings its own blocks. If any other field is set, `triton` computes it by queries.

    Attributes:
      q_blocksize: rows of q in one block of the plan (a multiple of 8). In `triton`, the lists of dq are the forward's.
      kv_blocksize: rows of k and v in one block of the plan (a multiple of 8).
      blocksize_m: rows of q that one GPU program holds (a power of two); of k and v in the kernel of dk and dv.
      blocksize_n: rows of k and v that one GPU loop step loads (a power of two); of q in the kernel of dk and dv.
      blocksize_k: slice of the head size that one GPU loop step multiplies (a power of two).
      blocksize_heads: query heads of one group that a program handles together (a power of two).
      blocksize_keys: keys (in the kernel of dk and dv, queries) that one split of a long row covers (a power of two).
      num_key_splits: programs over which each row of blocks is split, merged by log-sum-exp; before blocksize_keys.
      num_warps: warps of a GPU program (1, 2, 4, 8 or 16).
      num_stages: depth of the GPU's software pipeline.

    Raises:
      ValueError: a value lies outside its range.
    """

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    blocksize_m: int | None = None
    blocksize_n: int | None = None
    blocksize_k: int | None = None
    blocksize_heads: int | None = None
    blocksize_keys: int | None = None
    num_key_splits: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None or field.name not in _RANGES:
                continue
            lowest, highest, rule = _RANGES[field.name]
            number = as_int(value)
            if number is None or not lowest <= number <= highest or not _FITS[rule](number):
                raise ValueError(
                    f"{type(self).__name__}: {field.name} must be {rule} from {lowest} to {highest}, got {value!r}"
                )
            object.__setattr__(self, field.name, number)

    @property
    def has_kernel_settings(self) -> bool:
        """True if a field other than the block sizes of the plan is set."""
        return any(getattr(self, name) is not None for name in _RANGES if name not in ("q_blocksize", "kv_blocksize"))

    def __repr__(self):
        values = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        changed = ", ".join(f"{field.name}={value}" for field, value in values if value != field.default)
        return f"{type(self).__name__}({changed})"

    def content_hash(self) -> str:
        """Returns a hash of class, field names and values, 64 hex digits, equal in every process and Python version."""
        # Later fields count if they are set: tuned tables are stored under these hashes.
        values = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        fields = [f"{f.name}={value!r}" for f, value in values if f.name in _RANGES or value != f.default]
        return hashlib.sha256(f"{type(self).__name__}({', '.join(fields)})".encode()).hexdigest()


_FITS = {
    "an integer": lambda x: True,
    "a multiple of 8": lambda x: x % 8 == 0,
    "a power of two": lambda x: x & (x - 1) == 0,
}
_RANGES = {
    "q_blocksize": (8, 8192, "a multiple of 8"),
    "kv_blocksize": (8, 8192, "a multiple of 8"),
    "blocksize_m": (16, 256, "a power of two"),
    "blocksize_n": (32, 128, "a power of two"),
    "blocksize_k": (16, 512, "a power of two"),
    "blocksize_heads": (1, 256, "a power of two"),
    "blocksize_keys": (16, 1 << 20, "a power of two"),
    "num_key_splits": (1, 256, "an integer"),
    "num_warps": (1, 16, "a power of two"),
    "num_stages": (1, 8, "an integer"),
}


@strict_kwargs
@dataclasses.dataclass(frozen=True, repr=False)
class FwdParams(KernelParams):
    """Settings of the forward pass; see `KernelParams` for the fields (all int or None) and their ranges.

    Raises:
      ValueError: a value lies outside its range.

    Example:
      >>> import sparse_layers as sl
      >>> sl.FwdParams(q_blocksize=64, kv_blocksize=128).q_blocksize
      64
    """


@strict_kwargs
@dataclasses.dataclass(frozen=True, repr=False)
class BwdParams(KernelParams):
    """Settings of the backward pass; see `KernelParams` for the other fields (all int or None) and their ranges.

    Attributes:
      deterministic: True if gradients must be the same bit for bit from run to run. Of the implementations that add
        in an order that varies, `cudnn` then refuses the call, and `hopper` leaves this pass to `triton`, which sums
        the gradient of a bias's table in integers.

    Raises:
      ValueError: a value lies outside its range, or deterministic is no bool.

    Example:
      >>> import sparse_layers as sl
      >>> sl.BwdParams(kv_blocksize=100)
      Traceback (most recent call last):
      ValueError: BwdParams: kv_blocksize must be a multiple of 8 from 8 to 8192, got 100
      >>> sl.BwdParams(deterministic=True)
      BwdParams(deterministic=True)
    """

    deterministic: bool = False

    def __post_init__(self):
        super().__post_init__()
        checked("BwdParams: deterministic", self.deterministic, bool)


def resolve_params(fwd_params: FwdParams | None, bwd_params: BwdParams | None) -> tuple[FwdParams, BwdParams]:
    """Returns both parameters with None replaced by the defaults; backward blocks default to the forward's."""
    for name, params, kind in (("fwd_params", fwd_params, FwdParams), ("bwd_params", bwd_params, BwdParams)):
        if params is not None and not isinstance(params, kind):
            raise ValueError(f"{name} must be {kind.__name__} or None, got {params!r}")
    fwd = fwd_params or FwdParams()
    return fwd, bwd_params or BwdParams(q_blocksize=fwd.q_blocksize, kv_blocksize=fwd.kv_blocksize)
