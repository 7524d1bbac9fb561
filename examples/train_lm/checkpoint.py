"""Saving and restoring a run with orbax: all or nothing, the last two kept, and checked before anything reads them."""

import hashlib
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from .config import Refusal

# Written into a finished checkpoint, last of all. Damage is found by it and not by orbax, whose readers work in threads
# that report a bad file in many lines of their own.
_SEAL = "SHA256"


def save(folder: pathlib.Path, step: int, state: Any, facts: dict[str, Any]) -> None:
    """Writes ``state`` (a pytree of arrays) and ``facts`` (JSON) as the checkpoint of ``step``.

    Orbax writes beside the older checkpoints and renames at the end: an interrupted save leaves those untouched.
    """
    with _manager(folder) as manager:
        facts = {**facts, "arrays": _kinds(state)}
        items = {"state": ocp.args.StandardSave(_named(state)), "facts": ocp.args.JsonSave(facts)}
        manager.save(step, args=ocp.args.Composite(**items))
    checkpoint = folder / str(step)
    (checkpoint / _SEAL).write_text(_digest(checkpoint))


def latest(folder: pathlib.Path) -> tuple[int, dict[str, Any]]:
    """Step and facts of the newest checkpoint in ``folder``.

    Raises:
      Refusal: there is none, or it is damaged or of another program.
    """
    steps = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    if not steps:
        raise Refusal(f"{folder.parent} holds no checkpoint of this example")
    checkpoint = folder / str(max(steps))
    seal = checkpoint / _SEAL
    if not seal.is_file() or seal.read_bytes() != _digest(checkpoint).encode():
        raise Refusal(f"{checkpoint} is damaged or not of this example; without it --resume takes an older one, if any")
    with _manager(folder) as manager:
        facts = manager.restore(max(steps), args=ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]
    return max(steps), facts


def restore(folder: pathlib.Path, step: int, facts: dict[str, Any], like: Any) -> Any:
    """The state saved at ``step``, in the structure of ``like``.

    Raises:
      Refusal: its arrays have other names, shapes or dtypes: it is the state of another model.
    """
    if facts["arrays"] != _kinds(like):
        raise Refusal(f"{folder / str(step)} does not hold the weights of this model")
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, _named(like))
    with _manager(folder) as manager:
        leaves = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))["state"]
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in wanted])


def _manager(folder: pathlib.Path) -> ocp.CheckpointManager:
    # Synchronous: when `save` returns, the checkpoint is on disk.
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def _named(state: Any) -> dict[str, Any]:
    """Leaves by their paths, in one flat level."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


def _kinds(state: Any) -> dict[str, str]:
    """Dtype and shape of each leaf, as text."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in _named(state).items()}


def _digest(checkpoint: pathlib.Path) -> str:
    """Hex SHA-256 over names and contents of all files of a checkpoint but its seal."""
    digest = hashlib.sha256()
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != _SEAL):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(checkpoint).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
