"""Saving and restoring a run: arrays by orbax; all or nothing, whatever ends a save, and checked before being read.

``<folder>/<step>`` is a complete checkpoint: ``state`` (orbax), ``facts/metadata`` (JSON) and its seal. It is made as
``<step>.partial`` and gets its number in one rename; what is removed goes the same way back. ``<step>.replaced`` is
what the number meant until then, and still means while no folder has it.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from .config import Refusal
from .processes import is_first

# Written into a finished checkpoint, last of all. Damage is found by it and not by orbax, whose readers work in threads
# that report a bad file in many lines of their own.
_SEAL = "SHA256"
_FACTS = pathlib.Path("facts", "metadata")


def save(folder: pathlib.Path, step: int, state: Any, facts: dict[str, Any], keep: int = 2) -> None:
    """Writes ``state`` (a pytree of arrays) and ``facts`` (JSON) as the checkpoint of ``step``, on disk at the return.

    Of several processes that train together all call this: each writes its arrays, the first one all else.

    A process that is killed in here leaves the older checkpoints and perhaps this one, whole; the next save tidies up.

    Args:
      folder: of the checkpoints; made if it is not there.
      step: its checkpoint is replaced if it has one.
      state: its leaves are `jax.Array`, of any sharding.
      facts: what `latest` returns.
      keep: how many checkpoints stay: this one and the newest before it.

    Raises:
      Refusal: the disk is full or cannot be written; the message says what is left.
    """
    partial = folder / f"{step}.partial"
    first = is_first()
    try:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            _tidy(folder)
            _begin(partial, state, facts)
        multihost_utils.sync_global_devices("begun")
        _write(partial, state)
        if not first:
            return
        _seal(partial)
        if (folder / str(step)).exists():
            os.rename(folder / str(step), folder / f"{step}.replaced")
        os.rename(partial, folder / str(step))
        _sync(folder)
        for old_step in sorted(number for number in _checkpoints(folder) if number <= step)[:-keep]:
            os.rename(folder / str(old_step), folder / f"{old_step}.partial")
        _tidy(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # Only if it is empty: a run that has not begun can be started again.
        reason = error.strerror or error
        raise Refusal(f"{folder / str(step)} could not be written: {reason}; {_what_is_left(folder)}") from error


def has_any(folder: pathlib.Path) -> bool:
    """True if ``folder`` holds a checkpoint."""
    return bool(_checkpoints(folder))


def latest(folder: pathlib.Path) -> tuple[int, dict[str, Any]]:
    """Step and facts of the newest checkpoint in ``folder``.

    Raises:
      Refusal: there is none, or it is damaged or of another program.
    """
    checkpoints = _checkpoints(folder)
    if not checkpoints:
        raise Refusal(f"{folder.parent} holds no checkpoint of this example")
    step, checkpoint = max(checkpoints.items())
    if not _is_sealed(checkpoint):
        raise Refusal(f"{checkpoint} is damaged or not of this example; without it --resume takes an older one, if any")
    return step, json.loads((checkpoint / _FACTS).read_bytes())


def restore(folder: pathlib.Path, step: int, facts: dict[str, Any], like: Any) -> Any:
    """The state saved at ``step``, in the structure of ``like``.

    Args:
      folder: of the checkpoints.
      step: from `latest`.
      facts: from `latest`.
      like: a pytree of arrays, or of `jax.ShapeDtypeStruct` with a sharding. The state gets these shardings, whatever
        it had when it was saved.

    Raises:
      Refusal: its arrays have other names, shapes or dtypes: it is the state of another model.
    """
    if facts["arrays"] != _kinds(like):
        raise Refusal(f"{folder / str(step)} does not hold the weights of this model")
    named = _named(like)
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, named)
    with _arrays() as arrays:
        leaves = arrays.restore(_checkpoints(folder)[step].absolute() / "state", args=ocp.args.StandardRestore(wanted))
    # In the order of `named`: JAX and orbax sort names as text, by which layer 10 comes before layer 2.
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in named])


def _checkpoints(folder: pathlib.Path) -> dict[int, pathlib.Path]:
    """The complete checkpoints by their steps."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    # Backwards, so that "7" comes after "7.replaced" and takes its place.
    matches = [re.fullmatch(r"([0-9]+)(\.replaced)?", name) for name in sorted(names, reverse=True)]
    return {int(name[1]): folder / name[0] for name in matches if name}


def _what_is_left(folder: pathlib.Path) -> str:
    try:
        sealed = [step for step, path in _checkpoints(folder).items() if _is_sealed(path)]
    except OSError as error:
        return f"what has been saved before cannot be read: {error.strerror}"
    return f"the checkpoint of step {max(sealed)} is intact" if sealed else "nothing has been saved yet"


def _tidy(folder: pathlib.Path) -> None:
    """Undoes and deletes what saves and removals were killed over."""
    for step, path in _checkpoints(folder).items():
        if path.suffix:
            os.rename(path, folder / str(step))
    for path in folder.iterdir():
        if re.fullmatch(r"[0-9]+\.(partial|replaced)", path.name):
            shutil.rmtree(path, ignore_errors=True)


def _begin(checkpoint: pathlib.Path, state: Any, facts: dict[str, Any]) -> None:
    """Writes what a checkpoint has beside its arrays.

    Raises:
      OSError: it cannot be written, or there is no room for the arrays.
    """
    (checkpoint / _FACTS).parent.mkdir(parents=True)
    _require_room(checkpoint, sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
    (checkpoint / _FACTS).write_text(json.dumps({**facts, "arrays": _kinds(state)}))


def _write(checkpoint: pathlib.Path, state: Any) -> None:
    """Writes the arrays of a checkpoint; each process those that its devices hold.

    Raises:
      OSError: they cannot be written.
    """
    try:
        with _arrays() as arrays:
            arrays.save(checkpoint.absolute() / "state", args=ocp.args.StandardSave(_named(state)))
    except ValueError as error:
        # How orbax reports that tensorstore could not write.
        code = re.search(r"os_error_code='(\d+)'", str(error))
        raise (
            OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(f"{error}".split("\n")[0])
        ) from error


def _seal(checkpoint: pathlib.Path) -> None:
    """Seals a checkpoint that has been written, down to the disk."""
    (checkpoint / _SEAL).write_text(_digest(checkpoint))
    for path in (checkpoint, *checkpoint.rglob("*")):
        _sync(path)


def _require_room(folder: pathlib.Path, size: int) -> None:
    """Raises OSError if the disk, a quota or a limit has no room for ``size`` bytes and a little more.

    Orbax would find out too, but its threads report it in hundreds of lines and go on writing after it has returned.
    """
    if hasattr(os, "posix_fallocate"):
        with (folder / "room").open("wb") as room:
            os.posix_fallocate(room.fileno(), 0, size + 2**20)
        (folder / "room").unlink()


def _sync(path: pathlib.Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _arrays() -> ocp.Checkpointer:
    # Synchronous, unlike `ocp.StandardCheckpointer`: what has been saved is sealed next.
    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def _named(state: Any) -> dict[str, Any]:
    """Leaves by their paths, in one flat level."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _kinds(state: Any) -> dict[str, str]:
    """Dtype and shape of each leaf, as text."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _named(state).items()}


def _is_sealed(checkpoint: pathlib.Path) -> bool:
    try:
        return (checkpoint / _SEAL).read_bytes() == _digest(checkpoint).encode()
    except OSError:
        return False


def _digest(checkpoint: pathlib.Path) -> str:
    """Hex SHA-256 over names and contents of all files of a checkpoint but its seal."""
    digest = hashlib.sha256()
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != _SEAL):
        digest.update(f"{path.relative_to(checkpoint).as_posix()} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)  # Goes on with `digest`, piece by piece.
    return digest.hexdigest()
