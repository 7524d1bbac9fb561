"""Saving and restoring a run with orbax: all or nothing, the last two kept, and checked when read."""

import hashlib
import json
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from .config import Refusal


def save(folder: pathlib.Path, step: int, state: Any, facts: dict[str, Any]) -> None:
    """Writes ``state`` (a pytree of arrays) and ``facts`` (JSON) as the checkpoint of ``step``.

    Orbax writes beside the older checkpoints and renames at the end: an interrupted save leaves those untouched.
    """
    leaves = _named(state)
    facts = {**facts, "digest": _digest(leaves)}
    with _manager(folder) as manager:
        manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(leaves), facts=ocp.args.JsonSave(facts)))


def latest(folder: pathlib.Path) -> tuple[int, dict[str, Any]]:
    """Step and facts of the newest checkpoint.

    Raises:
      Refusal: there is none, or it cannot be read.
    """
    step = None
    if folder.is_dir():
        with _manager(folder) as manager:
            step = manager.latest_step()
    if step is None:
        raise Refusal(f"{folder.parent} holds no checkpoint of this example")
    return step, _read(folder, step, facts=ocp.args.JsonRestore())["facts"]


def restore(folder: pathlib.Path, step: int, like: Any, facts: dict[str, Any]) -> Any:
    """The saved state, in the structure, shapes and dtypes of ``like``.

    Raises:
      Refusal: the checkpoint is damaged or is one of another model.
    """
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, _named(like))
    leaves = _read(folder, step, state=ocp.args.StandardRestore(wanted))["state"]
    if _digest(leaves) != facts.get("digest"):
        raise _damaged(folder, step, "its arrays are not those that were saved")
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in _named(like)])


def _manager(folder: pathlib.Path) -> ocp.CheckpointManager:
    # Synchronous: a checkpoint that has been announced is on disk.
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def _read(folder: pathlib.Path, step: int, **items: Any) -> Any:
    try:
        with _manager(folder) as manager:
            return manager.restore(step, args=ocp.args.Composite(**items))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise _damaged(folder, step, str(error)) from error


def _damaged(folder: pathlib.Path, step: int, reason: str) -> Refusal:
    reason = " ".join(reason.split())[:160]
    return Refusal(f"{folder / str(step)} is damaged or not of this model; remove it to use an older one ({reason})")


def _named(state: Any) -> dict[str, Any]:
    """Leaves by a name that is flat: orbax then stores one level, and a foreign checkpoint differs in its names."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _digest(leaves: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(leaves)).encode())
    for name in sorted(leaves):
        digest.update(np.asarray(leaves[name]).tobytes())
    return digest.hexdigest()
