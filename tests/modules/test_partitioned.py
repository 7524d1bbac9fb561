"""Partitioned initializers name the axes of scanned layers as those of single ones, with the layers' axis in front."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from sparse_layers import linen
from tests.programs import on_devices

# On a mesh of 2 x 4: 8 layers, so that an axis of 4 would divide the layers, too.
PROGRAM = """
import sys

import jax, jax.numpy as jnp, numpy as np, optax, orbax.checkpoint
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import sparse_layers as sl

mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
wide = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("model", None))
narrow = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, None, "model"))
everywhere = nnx.with_partitioning(nnx.initializers.zeros, ())


def mlp(rngs):
    return nnx.Linear(16, 16, kernel_init=wide, bias_init=everywhere, rngs=rngs)


def make(seed=0, **options):
    shared = {"num_kv_heads": 4, "patterns": ("causal", "local:local_attn_ctx=3"), "seq_len": 8, "make_mlp": mlp}
    shared |= {"kernel_init": wide, "out_kernel_init": narrow, "head_init": nnx.initializers.lecun_normal()}
    return sl.SparseTransformer(11, 4, 16, 8, rngs=nnx.Rngs(seed), **shared | {"remat": True} | options)


def specs(tree):
    flat = nnx.to_flat_state(nnx.get_partition_spec(nnx.state(tree)))
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}


def loss(model, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens), tokens).mean()


@nnx.jit
def step(model, optimizer, tokens):
    value, gradients = nnx.value_and_grad(loss)(model, tokens)
    optimizer.update(model, gradients)
    return value


tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 8)))
names = {"attention.query.kernel": P("model", None), "attention.out.kernel": P(None, None, "model")}
names |= {"mlp_module.kernel": P("model", None), "mlp_module.bias": P(), "mlp_norm.scale": P()}
stacked = {name: P(None, *spec) if spec else P() for name, spec in names.items()}

with jax.set_mesh(mesh):
    scanned, plain = make(scan_layers=True), make()
    # In parameters, which lie on the mesh so, in moments before and after a step, and in gradients.
    optimizer = nnx.Optimizer(scanned, optax.adam(1e-2), wrt=nnx.Param)
    first = step(scanned, optimizer, tokens)
    assert step(scanned, optimizer, tokens) < first
    gradients = nnx.grad(loss)(scanned, tokens)
    for turn in "01":
        for name, spec in stacked.items():
            assert specs(scanned)[f"blocks.{turn}.{name}"] == spec, name
            assert specs(gradients)[f"blocks.{turn}.{name}"] == spec, name
            for moment in ("mu", "nu"):
                assert specs(optimizer)[f"opt_state.0.{moment}.blocks.{turn}.{name}"] == spec, name
        for name, spec in names.items():
            assert specs(plain)[f"blocks.{turn}.{name}"] == spec, name
    kernel = make(scan_layers=True).blocks[0].attention.query.kernel[...]
    assert kernel.shape == (4, 16, 4, 4)
    assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 4), kernel.sharding

    # One by one, layers are named as those of a model without a scan, and compute the same.
    unrolled = scanned.unrolled()
    for layer, like in zip(scanned.layers, plain.layers, strict=True):
        assert specs(layer) == specs(like)
    assert specs(unrolled) == specs(plain)
    np.testing.assert_allclose(nnx.jit(loss)(unrolled, tokens), nnx.jit(loss)(scanned, tokens), rtol=1e-5)
    assert nnx.grad(loss)(unrolled, tokens)["blocks"][7]["mlp_module"]["kernel"].out_sharding == ("model", None)

    # Restored into another model, features are split and never the layers.
    def on_mesh(tree):
        spec = nnx.get_named_sharding(nnx.state(tree), mesh)
        like = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return nnx.to_pure_dict(jax.tree.map(like, nnx.state(tree), spec))

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        for name, tree in (("model", scanned), ("optimizer", optimizer)):
            checkpointer.save(f"{sys.argv[1]}/{name}", nnx.to_pure_dict(nnx.state(tree)))
        checkpointer.wait_until_finished()
        again = make(1, scan_layers=True)
        rest = nnx.Optimizer(again, optax.adam(1e-2), wrt=nnx.Param)
        for name, tree in (("model", again), ("optimizer", rest)):
            state = nnx.state(tree)
            nnx.replace_by_pure_dict(state, checkpointer.restore(f"{sys.argv[1]}/{name}", on_mesh(tree)))
            nnx.update(tree, state)
    for kernel in (again.blocks[1].mlp_module.kernel, rest.opt_state[0].mu["blocks"][1]["mlp_module"]["kernel"]):
        assert kernel.out_sharding == (None, "model", None)
        assert kernel[...].shape == (4, 16, 16) and kernel[...].addressable_shards[0].data.shape == (4, 4, 16)
    assert step(again, rest, tokens) == step(scanned, optimizer, tokens)
"""


def test_scanned_layers_on_a_mesh(tmp_path):
    on_devices(8, "-W", "ignore", "-c", PROGRAM, str(tmp_path))


class Stack(nn.Module):
    """Three blocks of Linen in a scan, as the docstring of the block has it."""

    @nn.compact
    def __call__(self, x):
        wide = nn.with_partitioning(nn.initializers.lecun_normal(), ("model", None))
        block = linen.SparseTransformerBlock(2, 8, pattern="all", seq_len=4, num_layers=3, kernel_init=wide)
        scan = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        scan["metadata_params"] = {nn.PARTITION_NAME: None}
        return nn.scan(lambda block, x, _: (block(x), None), **scan)(block, x, None)[0]


def test_scanned_layers_of_linen():
    x = jnp.ones((1, 4, 8))
    variables = Stack().init(jax.random.key(0), x)
    params = nn.get_partition_spec(variables)["params"]["SparseTransformerBlock_0"]
    assert params["mlp_in"]["kernel"] == P(None, "model", None) and params["mlp_in"]["bias"] == P()
    assert Stack().apply(variables, x).shape == x.shape
