"""Compares the adapter with WeatherNext's dense path, in a checkout of it: values, gradients and weights.

Run it from the root of a clone of sparse_layers, which needs no installation:
python -m examples.hosts.weathernext.check PATH_TO_CHECKOUT
"""

import functools
import importlib
import pathlib
from collections.abc import Callable
from typing import Any

if not __package__:  # started by the name of this file
    raise SystemExit(__doc__)

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse

from ..checks import Table, import_host, path_argument, with_gradients
from .adapter import mesh_attention

WIDTH, HEADS, BATCH, HOPS = 256, 2, 2, 3
BLOCKS = {f"block_{name}": 128 for name in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute")}


class Host:
    """WeatherNext's transformer in a checkout, on its mesh of 162 nodes in its banded order."""

    def __init__(self, checkout: str):
        utils = "weathernext.utils"
        self.transformer, meshes = import_host(
            pathlib.Path(checkout), f"{utils}.sparse_transformer", f"{utils}.icosahedral_mesh"
        )
        self.haiku: Any = importlib.import_module("haiku")
        mesh = meshes.get_last_triangular_mesh_for_sphere(splits=2)
        order, renumber = meshes.get_permutation_to_banded(mesh)
        self.vertices = mesh.vertices[order]
        senders, receivers = (np.r_[x, np.arange(len(order))] for x in meshes.faces_to_edges(renumber(mesh.faces)))
        ones = np.ones(len(senders), bool)  # with an edge from each node to itself
        self.edges = scipy.sparse.csr_matrix((ones, (senders, receivers)), shape=(len(order),) * 2)
        keys = jax.random.split(jax.random.key(0), 3)
        shape = (BATCH, len(order), WIDTH)
        self.x, self.dout = (jax.random.normal(key, shape) for key in keys[:2])
        self.noise = jax.random.normal(keys[2], (BATCH, 16))

    def model(self, attention: str, mask: str = "lazy", **options: Any) -> Any:
        """Returns the transformer of two layers as Haiku's pair of init and apply."""
        options = BLOCKS | {"num_layers": 2, "d_model": WIDTH, "num_heads": HEADS} | options
        build = functools.partial(
            self.transformer.Transformer, self.edges, HOPS, attention, mask, name="mesh", **options
        )
        return self.haiku.without_apply_rng(self.haiku.transform(lambda x, noise: build()(x, noise)))

    def inputs(self, dtype: Any = jnp.float32) -> list[Any]:
        """Returns random weights, nodes, noise and a gradient of the result."""
        leaves, tree = jax.tree.flatten(self.model("mha").init(jax.random.key(1), self.x, self.noise))
        keys = jax.random.split(jax.random.key(2), len(leaves))
        leaves = [x + 0.05 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
        weights = jax.tree.unflatten(tree, leaves)
        return [*jax.tree.map(lambda x: x.astype(dtype), (weights, self.x, self.noise, self.dout))]

    def results(self, attention: str, mask: str = "lazy", **options: Any) -> Callable[..., list[jax.Array]]:
        """Returns a function of `inputs`: the result and the gradients of all weights, nodes and noise."""
        return jax.jit(with_gradients(self.model(attention, mask, **options).apply))


def check(host: Host, table: Table) -> None:
    """Compares `splash_mha` by the adapter with `mha`, and with the substitute that the host has for GPUs."""
    inputs, half, dense = host.inputs(), host.inputs(jnp.bfloat16), host.results("mha")
    unequal: Any = {"block_q": 64, "block_q_dkv": 64}
    for name, vertices in {"": None, ", sorted nodes": host.vertices}.items():
        host.transformer._make_splash_mha = mesh_attention(vertices)
        table.compare(f"lazy mask{name}", host.results("splash_mha"), dense, *inputs)
        table.compare(f"full mask{name}", host.results("splash_mha", "full"), dense, *inputs)
        table.compare(
            f"padding to 192 queries, 256 keys{name}", host.results("splash_mha", "lazy", **unequal), dense, *inputs
        )
        table.compare(f"bfloat16{name}", host.results("splash_mha"), dense, *half)
    wide = host.results("splash_mha", upcast_attn_to_fp32=True)
    table.compare("bfloat16, attention in float32", wide, dense, *half)
    table.compare("the host's own triblockdiag_mha", host.results("triblockdiag_mha"), dense, *inputs)


def main() -> None:
    """Runs all checks of the checkout that the command line names."""
    host, table = Host(path_argument(__doc__, "path to a checkout of WeatherNext")), Table()
    check(host, table)
    table.exit()


if __name__ == "__main__":
    main()
