"""Tile sizes, warps and pipeline stages of the Triton kernels: a tuned table, reduced to what fits a device."""

import dataclasses

from ...planning.params import KernelParams
from ..gpu.hardware import Device
from ..gpu.splits import MAX_SPLITS


@dataclasses.dataclass(frozen=True)
class Settings:
    """Tile sizes and compiler options of one kernel."""

    outer: int  # rows of the tile that a program holds
    inner: int  # rows of the tile that a step of its loop loads
    num_warps: int
    num_stages: int  # depth of the software pipeline


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


def shared_memory(
    kernel: str, settings: Settings, itemsize: int, sizes: tuple[int, int], capability: int, has_table: bool = False
) -> int:
    """Returns an upper bound of the bytes of shared memory; ``sizes`` are padded head sizes.

    With ``has_table``, dq kernels sum the gradient of a bias's table.
    """
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
    diagonals = 4 * settings.outer * settings.inner if has_table and kernel in ("dq", "dq_with_dkv") else 0
    return int(itemsize * (outer_elements + buffers * inner_elements + scores)) + diagonals + _SPARE


def unsupported(
    itemsize: int,
    sizes: tuple[int, int],
    params: tuple[KernelParams, KernelParams],
    device: Device,
    has_table: bool = False,
) -> str | None:
    """Returns why even the smallest tiles that the parameters allow do not fit a device, or None."""
    for kernel in ("forward", "dq", "dkv"):
        kernel_params = params[kernel != "forward"]
        smallest = choose_settings(kernel, itemsize, sizes, (16, 32), kernel_params, device, has_table)
        needed = shared_memory(kernel, smallest, itemsize, sizes, device.capability, has_table)
        if needed > device.shared_memory:
            explicit = "".join(
                f", {name}={value}" for name, value in dataclasses.asdict(kernel_params).items() if value
            )
            return (
                f"head sizes of {max(sizes)} with {itemsize} bytes an element{explicit} need about {needed} bytes of "
                f"shared memory, and this GPU has {device.shared_memory}"
            )
    return None


def outer_rows(kernel: str, itemsize: int, sizes: tuple[int, int]) -> int | None:
    """Returns the outer tile of a kernel in the table, or None if the table does not have the kernel."""
    entries = _entries(kernel, itemsize, sizes)
    return entries[0].outer if entries else None


def _entries(kernel: str, itemsize: int, sizes: tuple[int, int]) -> tuple[Settings, ...]:
    table = _TABLE.get((kernel, itemsize), {})
    size = min(size for size in _TABLE["forward", itemsize] if max(sizes) <= size)
    return table.get(size, ())


def choose_settings(
    kernel: str,
    itemsize: int,
    sizes: tuple[int, int],
    blocks: tuple[int, int],
    params: KernelParams,
    device: Device,
    has_table: bool = False,
) -> Settings:
    """Returns the settings of a kernel: the user's, else those of the table, reduced to fit the device and the blocks.

    ``sizes`` are padded head sizes of q and k, and of v; ``blocks`` rows of the outer side and of the inner one. The
    user's blocksize_m is of the outer side, also where that is keys.
    """
    entries = _entries(kernel, itemsize, sizes)
    settings = next((entry for entry in entries if entry.outer <= blocks[0]), entries[-1])
    outer, inner = (
        min(default, max(least, 1 << (block - 1).bit_length()))
        for default, least, block in zip((settings.outer, settings.inner), (16, 32), blocks, strict=True)
    )
    fields = (params.blocksize_m, params.blocksize_n, params.num_warps, params.num_stages)
    explicit = {
        x.name: value for x, value in zip(dataclasses.fields(Settings), fields, strict=True) if value is not None
    }
    settings = dataclasses.replace(settings, **({"outer": outer, "inner": inner} | explicit))
    while shared_memory(kernel, settings, itemsize, sizes, device.capability, has_table) > device.shared_memory:
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
