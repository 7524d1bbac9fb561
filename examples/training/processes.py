"""Several processes that train together: each has devices of its own, computes the same program, reads the same data.

Only the first one writes what belongs to a run; of a checkpoint each writes the arrays that its devices hold.
"""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

import jax

from .config import Refusal


def join(address: list[str]) -> None:
    """Makes this process one of several: JAX sees the devices of all of them from now on.

    Args:
      address: where the first process listens (HOST:PORT), how many there are and which of them this is, from 0 on; or
        nothing, for JAX to ask the cluster that started them.

    Raises:
      Refusal: it is something else, or JAX knows no such cluster.
    """
    if address and (
        len(address) != 3 or not all(map(str.isdecimal, address[1:])) or int(address[2]) >= int(address[1])
    ):
        raise Refusal(f"--processes must be HOST:PORT COUNT NUMBER, NUMBER below COUNT, got {' '.join(address)}")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        if address:
            jax.distributed.initialize(address[0], int(address[1]), int(address[2]))
        else:
            jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise Refusal(f"--processes {' '.join(address)}: JAX does not find them: {error}") from error


def is_first() -> bool:
    """True in the first of the processes that train together, or in the only one."""
    return jax.process_index() == 0


@contextlib.contextmanager
def own_folder(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """Where this process writes: ``out`` if it is the first, a folder that vanishes at the end if not."""
    if is_first():
        yield out
        return
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)
