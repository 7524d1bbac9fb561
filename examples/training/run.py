"""A model and its optimiser as pure functions of a state, laid out over the devices."""

import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from sparse_layers.ops.planning.platforms import platform

from . import checkpoint
from .config import Config, Refusal
from .data import Batch, Source
from .model import build, index_loss, mean_loss, scores
from .sharding import SEQUENCES, make_mesh, param_shardings, state_shardings

CHECKPOINTS = "checkpoints"

State = dict[str, Any]
C = TypeVar("C", bound=Config)


def use_device(name: str) -> None:
    """Makes JAX compute on a kind of device: "cpu", "gpu", "tpu" or "auto".

    Raises:
      Refusal: there is none.
    """
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: JAX_PLATFORMS=cuda where there is none
        raise Refusal(f"JAX finds no device with JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}") from error
    if name == "auto":
        return
    try:
        device = jax.local_devices(backend=name)[0]
    except RuntimeError as error:
        raise Refusal(f"--device {name}: JAX sees none here, it computes on {jax.default_backend()}") from error
    if device.platform != jax.default_backend():
        jax.config.update("jax_default_device", device)


def resolved(config: C) -> C:
    """The config with what "auto" stands for here, which is what a run goes on with.

    Raises:
      Refusal: the device is not there.
    """
    use_device(config.device)
    dtype = "float32" if platform() == "cpu" else "bfloat16"
    return dataclasses.replace(config, device=platform(), dtype=dtype if config.dtype == "auto" else config.dtype)


class Run(Generic[C]):
    """A model and its optimiser as pure functions of a state ``{"params": ..., "optimizer": ...}``.

    Args:
      config: its settings.

    Attributes:
      mesh: the devices; axes "data", "fsdp", "context" and "tensor".
      shardings: where each array of a state lies, a pytree like it.

    Raises:
      Refusal: the pattern cannot serve the length, or there are too few devices.
    """

    def __init__(self, config: C):
        self.config = config = resolved(config)
        self.mesh = make_mesh(config, platform())
        # A cosine that warms up needs at least one step on each side of the peak, even in a run of two steps.
        warmup = min(config.warmup, config.steps - 1)
        if warmup < config.warmup:
            print(f"the warm-up is shortened to {warmup} steps", file=sys.stderr)
        # The cosine ends after the last step, which would be wasted on a rate of 0.
        schedule = optax.warmup_cosine_decay_schedule(
            0.0, config.lr, warmup, config.steps + 1, config.lr * config.lr_end
        )
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
            optax.adamw(
                # The count starts at 0, where a warm-up would waste a step on a rate of 0.
                lambda count: schedule(count + 1),
                b2=config.beta2,
                weight_decay=config.weight_decay,
                mask=_decayed,
            ),
        )
        # `rest` is what is not learnt: the keys of dropout, which each step makes its own from.
        self._graph, abstract, _ = nnx.split(nnx.eval_shape(lambda: build(config)), nnx.Param, ...)
        shardings_of_params = param_shardings(abstract, self.mesh)
        self._shapes = {"params": abstract, "optimizer": jax.eval_shape(self._optimizer.init, abstract)}
        self.shardings = state_shardings(self._shapes, shardings_of_params)
        self._everywhere = NamedSharding(self.mesh, PartitionSpec())
        with jax.set_mesh(self.mesh):
            self._rest = jax.jit(self._fresh, static_argnums=0, out_shardings=self._everywhere)(1)

    def _fresh(self, index: int) -> Any:
        return nnx.split(build(self.config), nnx.Param, ...)[1:][index]

    @property
    def num_params(self) -> int:
        return sum(p.size for p in jax.tree.leaves(self._shapes["params"]))

    @property
    def like(self) -> State:
        """Shapes, dtypes and shardings of a state."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), self._shapes, self.shardings
        )

    def init(self) -> State:
        """The state before the first step."""

        def fresh():
            params = self._fresh(0)
            return {"params": params, "optimizer": self._optimizer.init(params)}

        with jax.set_mesh(self.mesh):
            return jax.jit(fresh, out_shardings=self.shardings)()

    def shard(self, batch: Batch) -> Batch:
        """A batch on the devices, split by sequences; each process hands its own devices what is theirs."""
        lies = NamedSharding(self.mesh, SEQUENCES)
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, lies, x.__getitem__), batch)

    def batch(self, source: Source, number: int) -> Batch:
        """Returns the batch of the ``number``-th step, from 1 on, on the devices."""
        return self.shard(source.batch(number - 1))

    def model(self, state: State, step: Any = 0) -> Any:
        """The model with the weights of ``state``, and the dropout of a step."""
        rest = jax.tree.map(
            lambda leaf: _fold_in(leaf, step) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf, self._rest
        )
        return nnx.merge(self._graph, state["params"], rest)

    def scores(self, state: State, batch: Batch) -> dict[str, jax.Array]:
        """Returns the scores of a batch, without dropout: see `model.scores`."""
        return scores(self.model(state), batch)

    def step(self, state: State, batch: Batch, number: Any) -> tuple[State, dict[str, jax.Array]]:
        """One optimiser step, the ``number``-th: the new state, and the loss and the gradients' norm before it."""

        def loss(params):
            model = self.model({"params": params}, number)
            value = mean_loss(model, batch, deterministic=not self.config.dropout)
            return value + index_loss(model), value

        (_, value), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, optimizer = self._optimizer.update(grads, state["optimizer"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}
        return new, {"loss": value, "grad_norm": optax.tree.norm(grads)}

    def finite(self, state: State) -> jax.Array:
        """Returns True if all weights and moments are finite numbers."""
        return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)]))

    def compiled(self, batch: Batch) -> tuple[Any, Any, Any]:
        """`step` (whose first argument is used up), `scores` and `finite`, compiled for batches like this one.

        Raises:
          Refusal: they do not fit the devices' memory.
        """
        like, number = self.like, np.int32(1)
        outs = (self.shardings, self._everywhere)
        with jax.set_mesh(self.mesh), fitting(self.config):
            step = jax.jit(self.step, donate_argnums=0, out_shardings=outs).lower(like, batch, number).compile()
            evaluate = jax.jit(self.scores, out_shardings=self._everywhere).lower(like, batch).compile()
            finite = jax.jit(self.finite, out_shardings=self._everywhere).lower(like).compile()
        return step, evaluate, finite


def open_run(kind: type[C], out: str, device: str = "auto") -> tuple[Run[C], State, dict[str, Any]]:
    """A saved run, its newest state on the devices, and the facts saved with it.

    Where there are fewer devices than weights or sequences were split over, each holds all of them.

    Args:
      kind: of config, that of the example.
      out: folder of the run.
      device: as in `Config`, of any kind.

    Raises:
      Refusal: the folder holds no checkpoint, or one that is damaged; or as `Run`.
    """
    folder = pathlib.Path(out) / CHECKPOINTS
    with reading(out):
        step, facts = checkpoint.latest(folder)
        config = dataclasses.replace(kind.load(facts["config"], {"out": out}), device=device, data_parallel=0)
        use_device(device)
        if config.fsdp * config.context_parallel * config.tensor_parallel > len(jax.devices(platform())):
            config = dataclasses.replace(config, fsdp=1, context_parallel=1, tensor_parallel=1)
        run = Run(config)
        return run, checkpoint.restore(folder, step, facts, run.like), facts


@contextlib.contextmanager
def reading(out: str) -> Iterator[None]:
    """Says in one line that a run's folder cannot be read.

    Raises:
      Refusal: that line.
    """
    try:
        yield
    except OSError as error:
        raise Refusal(f"--out {out}: cannot read {error.filename or ''}: {error.strerror or error}") from error


@contextlib.contextmanager
def fitting(config: Config) -> Iterator[None]:
    """Says in one line that the memory, of the devices or of the host, is too small.

    Raises:
      Refusal: it is.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        hint = "" if config.recompute else ", or --recompute"
        raise Refusal(
            f"--batch-size {config.batch_size} {config.length} does not fit the memory of the "
            f"{jax.devices()[0].device_kind}: take a smaller batch{hint}"
        ) from error


def used(program: Any) -> int:
    """Bytes that a compiled program takes of one device: arguments, results and all between, by its own account."""
    size = program.memory_analysis()
    taken = size.argument_size_in_bytes + size.output_size_in_bytes + size.temp_size_in_bytes
    return taken - size.alias_size_in_bytes


def _decayed(params: Any) -> Any:
    """Returns a tree, True where weight decay acts: by name, since biases of stacked layers are matrices, too."""
    names = ("kernel", "embedding")
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(n in jax.tree_util.keystr(path[-2:]) for n in names), params
    )


def _fold_in(keys: jax.Array, step: Any) -> jax.Array:
    """Returns the keys of a step, from one key or an array of keys."""
    fold = lambda key: jax.random.fold_in(key, step)  # noqa: E731
    for _ in range(keys.ndim):
        fold = jax.vmap(fold)
    return fold(keys)
