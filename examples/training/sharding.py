"""Shardings: a mesh of four axes, and Flax's annotations of the parameters by these axes.

No collective is written here: JAX's partitioner inserts them, and the attention op maps itself over the mesh.
"""

import math

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .config import Config, Refusal

AXES = ("data", "fsdp", "context", "tensor")
# A batch is split by sequences over both of the first two axes, and so is all that has them in front; what has
# features, tokens of a sequence too; queries by heads as well.
SEQUENCES = PartitionSpec(("data", "fsdp"))
TOKENS = PartitionSpec(("data", "fsdp"), "context")
QUERIES = PartitionSpec(("data", "fsdp"), "context", "tensor")

# The axis of the mesh for each axis of a layer's kernel; a bias lies as its layer's results do. What is not listed
# (scales, the tables of 256 bytes and of positions) is small and lies on all devices; so does what an axis of the mesh
# does not divide.
_KERNELS = {
    "query": ("fsdp", "tensor", None),
    "key": ("fsdp", "tensor", None),
    "value": ("fsdp", "tensor", None),
    "out": ("tensor", None, "fsdp"),
    "mlp_in": ("fsdp", "tensor"),
    "mlp_gate": ("fsdp", "tensor"),
    "mlp_out": ("tensor", "fsdp"),
}


def make_mesh(config: Config, platform: str) -> Mesh:
    """The mesh of ``config`` over the devices of a platform; axes are `AXES`.

    Raises:
      Refusal: there are too few devices, or so many that a process would be left without.
    """
    devices = jax.devices(platform)
    shape = (config.fsdp, config.context_parallel, config.tensor_parallel)
    rest = math.prod(shape)
    most = len(devices) // rest
    data = config.data_parallel or max(
        (d for d in range(1, most + 1) if config.batch_size % (d * config.fsdp) == 0), default=1
    )
    if data > most:
        raise Refusal(
            f"--data-parallel {data} --fsdp {config.fsdp} --context-parallel {config.context_parallel} "
            f"--tensor-parallel {config.tensor_parallel} needs {data * rest} devices, JAX sees {len(devices)} "
            f"({platform}); a run may go on with others"
        )
    if data * rest < len(devices) and jax.process_count() > 1:
        raise Refusal(f"{data * rest} of {len(devices)} devices would compute, several processes must use all")
    return jax.make_mesh((data, *shape), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices[: data * rest])


def param_shardings(params: nnx.State, mesh: Mesh) -> nnx.State:
    """Where each parameter of a `sparse_layers.SparseTransformer` lies: a pytree like ``params``, of NamedSharding."""
    annotated = nnx.clone(params)
    for path, variable in nnx.to_flat_state(annotated):
        layer, name = path[-2:]
        names = _KERNELS.get(str(layer), ())
        if name == "bias":
            names = names[1:] if names[:1] == ("fsdp",) else ()
        # Parameters of scanned layers have one axis more, in front: the layer.
        names = (None,) * (variable.ndim - len(names)) + names
        fits = zip(names, variable.shape, strict=True)
        variable.set_metadata(out_sharding=tuple(n if n and size % mesh.shape[n] == 0 else None for n, size in fits))
    shardings = nnx.get_named_sharding(annotated, mesh)
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(shardings))


def state_shardings(state: dict, params: nnx.State) -> dict:
    """Where a whole training state lies: its parameters as ``params`` says, moments like their parameters.

    Args:
      state: {"params": like params, "optimizer": ...}; whatever is named and shaped as no parameter is on all devices.
      params: of `param_shardings`.
    """
    shardings = {jax.tree_util.keystr(path): s for path, s in jax.tree_util.tree_leaves_with_path(params)}
    everywhere = NamedSharding(next(iter(shardings.values())).mesh, PartitionSpec())

    def sharding_of(path, leaf):
        name = jax.tree_util.keystr(path)
        return next((s for end, s in shardings.items() if leaf.ndim and name.endswith(end)), everywhere)

    return jax.tree_util.tree_map_with_path(sharding_of, state)
