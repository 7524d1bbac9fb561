"""Tile sizes, warps and pipeline depths of the kernels: the tuned table, and what does not fit made to fit."""

import dataclasses

from ...planning.params import KernelParams
from ..gpu.hardware import Device
from ..gpu.splits import MAX_SPLITS


@dataclasses.dataclass(frozen=True)
class Settings:
    """How one kernel is compiled.

    Attributes:
      major: rows of the tile that a program holds.
      minor: rows of the tile that a step of its loop loads.
      num_warps: warps of a program.
      num_stages: depth of the software pipeline.
    """

    major: int
    minor: int
    num_warps: int
    num_stages: int


# By kernel, bytes of an element (float32 is multiplied without tensor cores), and largest head size: the settings for
# blocks of at least as many rows, or else the last. Measured on an H200. "fused" is the dq kernel that gives dk and dv,
# too; it is not used where it has no entry. "kv_outer" is the forward kernel that holds keys and gathers queries; its
# backward kernel, which gives all three gradients, is "dqkv".
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
    ("fused", 2): {64: (Settings(128, 64, 4, 2),), 128: (Settings(128, 64, 8, 2),)},
    ("kv_outer", 2): {
        64: (Settings(128, 64, 4, 3),),
        128: (Settings(128, 64, 4, 3),),
        256: (Settings(64, 64, 8, 2),),
    },
    ("dqkv", 2): {64: (Settings(128, 64, 8, 2),), 128: (Settings(128, 64, 8, 2),), 256: (Settings(64, 64, 8, 1),)},
    ("forward", 4): {64: (Settings(64, 32, 4, 2),), 128: (Settings(32, 32, 4, 2),), 256: (Settings(32, 32, 8, 1),)},
    ("dq", 4): {64: (Settings(64, 32, 4, 2),), 128: (Settings(32, 32, 4, 2),), 256: (Settings(32, 32, 8, 1),)},
    ("dkv", 4): {64: (Settings(64, 32, 4, 2),), 128: (Settings(32, 32, 4, 2),), 256: (Settings(32, 32, 8, 1),)},
    ("kv_outer", 4): {64: (Settings(64, 32, 4, 2),), 128: (Settings(32, 32, 4, 2),), 256: (Settings(32, 32, 8, 1),)},
    ("dqkv", 4): {64: (Settings(64, 32, 4, 2),), 128: (Settings(32, 32, 4, 2),), 256: (Settings(32, 32, 8, 1),)},
}
# Shared memory beside the tiles: layout changes of scores, and what reductions need.
_SPARE = 2048


def shared_memory(kernel: str, settings: Settings, itemsize: int, sizes: tuple[int, int], capability: int) -> int:
    """An upper estimate of the bytes of shared memory; ``sizes`` are head sizes rounded up to powers of two."""
    held, loaded = settings.major * sizes[0], settings.minor * sum(sizes)
    if kernel != "forward":
        held += settings.major * sizes[1]
    # One stage of three and more is the look-up of the block; without a pipeline, tiles are kept in several layouts.
    buffers = {1: 1.5, 2: 2}.get(settings.num_stages, settings.num_stages - 1)
    scores = settings.major * settings.minor * (1 if kernel == "forward" else 2)
    if capability >= 100:  # tensor cores read scores from shared memory, too
        scores *= 2
    elif capability < 90 and settings.num_stages > 1 and itemsize == 2 and kernel not in ("fused", "dqkv"):
        # They read the left side of a product from registers; only these two need all their tiles on either side.
        held, scores = (0, scores) if kernel == "forward" else (held / 2, scores / 2)
    return int(itemsize * (held + buffers * loaded + scores)) + _SPARE


def misfit(
    itemsize: int, sizes: tuple[int, int], params: tuple[KernelParams, KernelParams], device: Device
) -> str | None:
    """Why not even the smallest tiles that forward and backward parameters leave open fit a device, or None."""
    for kernel in ("forward", "dq", "dkv"):
        own = params[kernel != "forward"]
        least = choose(kernel, itemsize, sizes, (16, 32), own, device)
        needed = shared_memory(kernel, least, itemsize, sizes, device.capability)
        if needed > device.shared_memory:
            explicit = "".join(f", {name}={value}" for name, value in dataclasses.asdict(own).items() if value)
            return (
                f"head sizes of {max(sizes)} with {itemsize} bytes an element{explicit} need about {needed} bytes of "
                f"shared memory, and this GPU has {device.shared_memory}"
            )
    return None


def rows_of(kernel: str, itemsize: int, sizes: tuple[int, int]) -> int | None:
    """The rows that a program of a kernel holds by the table, or None if the table does not have the kernel."""
    entries = _entries(kernel, itemsize, sizes)
    return entries[0].major if entries else None


def _entries(kernel: str, itemsize: int, sizes: tuple[int, int]) -> tuple[Settings, ...]:
    table = _TABLE.get((kernel, itemsize), {})
    size = min(size for size in _TABLE["forward", itemsize] if max(sizes) <= size)
    return table.get(size, ())


def choose(
    kernel: str, itemsize: int, sizes: tuple[int, int], blocks: tuple[int, int], params: KernelParams, device: Device
) -> Settings:
    """The settings of a kernel: explicit ones, else those of the table, made to fit the device and the blocks.

    Args:
      kernel: "forward", "dq", "dkv", "fused", "kv_outer" or "dqkv".
      itemsize: bytes of an element of q, k and v.
      sizes: head sizes of q and k, and of v, rounded up to powers of two.
      blocks: rows of a block of the side that a program holds, and of the other.
      params: the user's; for programs that hold keys, blocksize_m and blocksize_n change places.
      device: where it will run.
    """
    entries = _entries(kernel, itemsize, sizes)
    settings = next((entry for entry in entries if entry.major <= blocks[0]), entries[-1])
    major, minor = (
        min(default, max(least, 1 << (block - 1).bit_length()))
        for default, least, block in zip((settings.major, settings.minor), (16, 32), blocks, strict=True)
    )
    fields = (params.blocksize_m, params.blocksize_n, params.num_warps, params.num_stages)
    given = {x.name: value for x, value in zip(dataclasses.fields(Settings), fields, strict=True) if value is not None}
    settings = dataclasses.replace(settings, **({"major": major, "minor": minor} | given))
    while shared_memory(kernel, settings, itemsize, sizes, device.capability) > device.shared_memory:
        # Two stages are given up last but for the tile itself: without them, loads wait for products.
        steps = (
            ("num_stages", settings.num_stages - 1, 2),
            ("minor", settings.minor // 2, 32),
            ("num_stages", settings.num_stages - 1, 1),
            ("major", settings.major // 2, 16),
        )
        step = next(((name, value) for name, value, least in steps if name not in given and value >= least), None)
        if step is None:
            break
        settings = dataclasses.replace(settings, **{step[0]: step[1]})
    return settings


def pieces_asked(params: KernelParams, rows: int) -> int | None:
    """Into how many pieces the user wants each list of so many minor rows cut, 0 for none; None leaves it open."""
    number = params.num_key_splits
    if number is None and params.blocksize_keys is not None:
        number = min(MAX_SPLITS, -(-rows // params.blocksize_keys))
    return 0 if number == 1 else number
