"""Tile sizes, warps and pipeline stages of the Triton kernels: a tuned table, reduced to what fits a device."""

import dataclasses

from ...planning.params import KernelParams
from ..gpu.hardware import Device, padded_size
from ..gpu.splits import MAX_SPLITS
from ..operands import Operands


@dataclasses.dataclass(frozen=True)
class Settings:
    """Tile sizes and compiler options of one kernel."""

    outer: int  # rows of the tile that a program holds
    inner: int  # rows of the tile that a step of its loop loads
    num_warps: int
    num_stages: int  # depth of the software pipeline


@dataclasses.dataclass(frozen=True)
class KernelInputs:
    """The properties of a call's arrays that decide its tile sizes."""

    itemsize: int  # bytes of an element of q, k and v
    head_sizes: tuple[int, int]  # padded head sizes of q and k, and of v
    has_table: bool = False  # True if a bias has a table, whose gradient dq kernels sum

    @classmethod
    def of(cls, operands: Operands) -> "KernelInputs":
        """Returns the properties of the operands of a call."""
        head_sizes = padded_size(operands.query.shape[-1]), padded_size(operands.value.shape[-1])
        return cls(operands.query.dtype.itemsize, head_sizes, operands.bias_table is not None)


# By kernel, bytes of an element (float32 is multiplied without tensor cores), and largest head size: the settings for
# blocks of at least as many rows, or else the last. Measured on an H200. "dq_with_dkv" is the dq kernel that stores dk
# and dv, too; without an entry it is not used. "kv_outer" is the forward kernel that holds keys and gathers queries.
# "dkv_with_dq" is its backward kernel: the dkv kernel that stores dq, too.
_TABLE: dict[tuple[str, int], dict[int, tuple[Settings, ...]]] = {
    ("forward", 2): {
        64: (Settings(64, 64, 4, 3),),
        128: (Settings(128, 64, 4, 2), Settings(64, 32, 4, 2), Settings(32, 64, 2, 2)),
        256: (Settings(64, 32, 4, 2),),
    },
    ("dq", 2): {
        64: (Settings(64, 64, 4, 3),),
        128: (Settings(64, 64, 4, 2), Settings(32, 64, 2, 2)),
        256: (Settings(128, 32, 8, 1),),
    },
    ("dkv", 2): {
        64: (Settings(64, 64, 4, 2),),
        128: (Settings(64, 64, 4, 2),),
        256: (Settings(64, 32, 8, 2),),
    },
    ("dq_with_dkv", 2): {64: (Settings(128, 64, 4, 2),), 128: (Settings(128, 64, 8, 2),)},
    ("kv_outer", 2): {
        64: (Settings(128, 64, 4, 3),),
        128: (Settings(128, 64, 4, 3),),
        256: (Settings(64, 64, 8, 2),),
    },
    ("dkv_with_dq", 2): {
        64: (Settings(128, 64, 8, 2),),
        128: (Settings(128, 64, 8, 2),),
        256: (Settings(64, 64, 8, 1),),
    },
    ("forward", 4): {64: (Settings(64, 32, 4, 2),), 128: (Settings(32, 32, 4, 2),), 256: (Settings(32, 32, 8, 1),)},
    ("dq", 4): {64: (Settings(64, 32, 4, 2),), 128: (Settings(32, 32, 4, 2),), 256: (Settings(32, 32, 8, 1),)},
    ("dkv", 4): {64: (Settings(64, 32, 4, 2),), 128: (Settings(32, 32, 4, 2),), 256: (Settings(32, 32, 8, 1),)},
    ("kv_outer", 4): {64: (Settings(64, 32, 4, 2),), 128: (Settings(32, 32, 4, 2),), 256: (Settings(32, 32, 8, 1),)},
    ("dkv_with_dq", 4): {64: (Settings(64, 32, 4, 2),), 128: (Settings(32, 32, 4, 2),), 256: (Settings(32, 32, 8, 1),)},
}
# Shared memory beside the tiles: layout changes of scores, and what reductions need.
_SPARE = 2048


def shared_memory(kernel: str, settings: Settings, inputs: KernelInputs, capability: int) -> int:
    """Returns an upper bound of the bytes of shared memory."""
    itemsize, sizes = inputs.itemsize, inputs.head_sizes
    outer_elements, inner_elements = settings.outer * sizes[0], settings.inner * sum(sizes)
    if kernel != "forward":
        outer_elements += settings.outer * sizes[1]
    # One stage of three and more is the look-up of the block; without a pipeline, tiles are kept in several layouts.
    buffers = {1: 1.5, 2: 2}.get(settings.num_stages, settings.num_stages - 1)
    scores = settings.outer * settings.inner * (1 if kernel == "forward" else 2)
    if capability >= 100:  # tensor cores read scores from shared memory, too
        scores *= 2
    elif capability < 90 and settings.num_stages > 1 and itemsize == 2 and kernel not in ("dq_with_dkv", "dkv_with_dq"):
        # They read the left side of a product from registers; only these two need all their tiles on either side.
        outer_elements, scores = (0, scores) if kernel == "forward" else (outer_elements / 2, scores / 2)
    # With a table, logits change their layout in float32, and so do the diagonals of their gradient.
    logits = {"forward": 2, "dq": 4, "dq_with_dkv": 4}.get(kernel, 0) * settings.outer * settings.inner
    logits = logits if inputs.has_table else 0
    return int(itemsize * (outer_elements + buffers * inner_elements + scores)) + logits + _SPARE


def unsupported(inputs: KernelInputs, params: tuple[KernelParams, KernelParams], device: Device) -> str | None:
    """Returns why even the smallest tiles that the parameters allow do not fit a device, or None."""
    for kernel in ("forward", "dq", "dkv"):
        kernel_params = params[kernel != "forward"]
        smallest = choose_settings(kernel, inputs, (16, 32), kernel_params, device)
        needed = shared_memory(kernel, smallest, inputs, device.capability)
        if needed > device.shared_memory:
            explicit = "".join(
                f", {name}={value}" for name, value in dataclasses.asdict(kernel_params).items() if value
            )
            return (
                f"head sizes of {max(inputs.head_sizes)} with {inputs.itemsize} bytes an element{explicit} need about "
                f"{needed} bytes of shared memory, and this GPU has {device.shared_memory}"
            )
    return None


def outer_rows(kernel: str, inputs: KernelInputs) -> int | None:
    """Returns the outer tile of a kernel in the table, or None if the table does not have the kernel."""
    entries = _entries(kernel, inputs)
    return entries[0].outer if entries else None


def _entries(kernel: str, inputs: KernelInputs) -> tuple[Settings, ...]:
    table = _TABLE.get((kernel, inputs.itemsize), {})
    size = min(size for size in _TABLE["forward", inputs.itemsize] if max(inputs.head_sizes) <= size)
    return table.get(size, ())


def choose_settings(
    kernel: str, inputs: KernelInputs, blocks: tuple[int, int], params: KernelParams, device: Device
) -> Settings:
    """Returns the settings of a kernel: the user's, else those of the table, reduced to fit the device and the blocks.

    ``blocks`` are rows of the outer side and of the inner one. The user's blocksize_m is of the outer side, also where
    that is keys.
    """
    entries = _entries(kernel, inputs)
    settings = next((entry for entry in entries if entry.outer <= blocks[0]), entries[-1])
    outer, inner = (
        min(default, max(least, 1 << (block - 1).bit_length()))
        for default, least, block in zip((settings.outer, settings.inner), (16, 32), blocks, strict=True)
    )
    num_warps = settings.num_warps
    if kernel == "forward" and inputs.has_table and inputs.itemsize == 2 and max(inputs.head_sizes) == 128:
        # The index and the entry of each pair take registers, of which 4 warps spill some: 7.1 ms, with 8 warps 6.6, of
        # causal attention. Backward, 8 warps take twice as long as 4.
        num_warps = max(num_warps, 8) if outer * inner >= 64 * 64 else num_warps
    fields = (params.blocksize_m, params.blocksize_n, params.num_warps, params.num_stages)
    explicit = {
        x.name: value for x, value in zip(dataclasses.fields(Settings), fields, strict=True) if value is not None
    }
    settings = dataclasses.replace(settings, **({"outer": outer, "inner": inner, "num_warps": num_warps} | explicit))
    while shared_memory(kernel, settings, inputs, device.capability) > device.shared_memory:
        # A single stage comes late, before a smaller outer tile only: with it, loads wait for products.
        steps = (
            ("num_stages", settings.num_stages - 1, 2),
            ("inner", settings.inner // 2, 32),
            ("num_stages", settings.num_stages - 1, 1),
            ("outer", settings.outer // 2, 16),
        )
        step = next(((name, value) for name, value, least in steps if name not in explicit and value >= least), None)
        if step is None:
            break
        settings = dataclasses.replace(settings, **{step[0]: step[1]})
    return settings


def requested_splits(params: KernelParams, rows: int) -> int | None:
    """Returns the number of splits of every work tile that the user requests, 0 for none; None to choose.

    ``rows`` is the number of inner rows.
    """
    number = params.num_key_splits
    if number is None and params.blocksize_keys is not None:
        number = min(MAX_SPLITS, -(-rows // params.blocksize_keys))
    return 0 if number == 1 else number
