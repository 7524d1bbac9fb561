"""The op over several devices: batch entries and heads are independent, so each device computes its own.

A sequence may be sharded too: with context parallelism, devices exchange keys, see `shard_calls.py`.

A kernel is a program for one device, which JAX cannot split. The kind of the mesh axes decides how the op is split:

* Axes of type Explicit: shardings are part of the types of arrays. `over_known_axes` maps the whole op over them
  by `jax.shard_map`, outside its derivative, so that JAX sums the gradients of what devices share.
* Axes of type Auto: shardings are known when the partitioner runs. If the caller gives the sharding of query, the op is
  mapped over these axes in the same way. If not, `over_auto_axes` tells the partitioner how to split the forward and
  the backward pass separately, because `custom_partitioning` has no derivative.
* Axes of type Manual, inside a `jax.shard_map` of the caller: arrays are local already.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .kernels.call import Call
from .kernels.operands import Operands, axes_of, differentiated, labels_of
from .planning.platforms import platform

# Axes that the partitioner splits, and those of `jax.vmap`, v0, v1, ...; see `Operand` for all.
_SPLIT = "b", "n", "k", "v"


# --- the shard of one device -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SequenceShards:
    """A sequence over several devices, with context parallelism."""

    axes: tuple[str, ...]  # the mesh axes of these devices; their order is that of the tokens
    devices: int  # their number
    length: int  # tokens that are computed, as many on each device. The arrays may be shorter: they are padded.
    shards_keys: bool  # True if keys are sharded as queries are; False if each device has all keys

    @property
    def first_token(self) -> jax.Array:
        """The first token of this device."""
        return jax.lax.axis_index(self.axes) * -(-self.length // self.devices)

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Gathers local rows of all devices: [B, n, ...] -> [B, T, ...]."""
        return jax.lax.all_gather(x, self.axes, axis=1, tiled=True)[:, : self.length]


@dataclasses.dataclass(frozen=True)
class Shard:
    """The heads and tokens of one device."""

    heads: int  # the number of query heads on all devices together
    # The number of key heads on all devices together. A device holds those of its query heads only if ``shards``
    # divides it, else all of them.
    kv_heads: int
    shards: int = 1  # the number of devices that the query heads are split over
    axes: tuple[str, ...] = ()  # the mesh axes of these devices; the index along them is the number of the shard
    kv_head_axes: tuple[tuple[str, int], ...] = ()  # names of the operands with key heads, each with the axis of these
    sequence: SequenceShards | None = None  # how the sequence is sharded; None if each device has all of it

    @staticmethod
    def of(
        operands: Operands, mesh: Any = None, axes: tuple[str, ...] = (), sequence: SequenceShards | None = None
    ) -> "Shard":
        """Returns the shard of a device, if mesh axes split the heads of the operands, which hold all heads."""
        shards = math.prod(mesh.shape[axis] for axis in axes)
        names = {name: jax.tree.leaves(axes)[:1] for name, axes in axes_of(operands)._asdict().items()}
        kv_head_axes = tuple(
            (name, axes.split().index("k")) for name, first in names.items() for axes in first if "k" in axes.split()
        )
        return Shard(operands.query.shape[-2], operands.key.shape[-2], shards, axes, kv_head_axes, sequence)

    @property
    def splits_kv_heads(self) -> bool:
        """True if a device holds the key heads of its query heads only."""
        return self.kv_heads % self.shards == 0

    def call_backend(self, function: Callable[..., Any], call: Call, operands: Operands, *by_query: jax.Array) -> Any:
        """Returns a backend's forward, or with ``by_query`` its backward, on local arrays; ``call`` has all heads.

        If the device holds all key heads, their gradients must still be summed over the devices.
        """
        if self.splits_kv_heads:
            return self._call_with_local_plan(function, call, operands, *by_query)
        kv_heads = self.local_kv_heads()
        local = {
            name: jax.tree.map(functools.partial(jnp.take, indices=kv_heads, axis=axis), getattr(operands, name))
            for name, axis in self.kv_head_axes
        }
        results = self._call_with_local_plan(function, call, operands._replace(**local), *by_query)
        if not by_query:
            return results
        acc_dtype = by_query[0].dtype
        for name, axis in self.kv_head_axes:
            if name in differentiated(operands):
                full, heads = getattr(operands, name), (*[slice(None)] * axis, kv_heads)
                gradient = jnp.zeros_like(full, acc_dtype).at[heads].add(getattr(results, name).astype(acc_dtype))
                results = results._replace(**{name: gradient.astype(full.dtype)})
        return results

    def local_kv_heads(self) -> jax.Array:
        """Returns the key heads that the device's query heads use: one for all of these, or one for each."""
        q_heads, group = self.heads // self.shards, self.heads // self.kv_heads
        return (jax.lax.axis_index(self.axes) * q_heads + jnp.arange(1 if group % q_heads == 0 else q_heads)) // group

    def _call_with_local_plan(self, function: Callable[..., Any], call: Call, *args: Any) -> Any:
        """Returns function(call, *args), where the call has the plan of the device's heads and rank."""
        if call.plan is None:
            return function(call, *args)
        q_heads = self.heads // self.shards
        plans_by_rank = call.plans_by_rank or (call.plan,)
        plans = [plan.for_heads(i * q_heads, q_heads) for plan in plans_by_rank for i in range(self.shards)]
        distinct = list(dict.fromkeys(plans))
        calls = [dataclasses.replace(call, plan=plan, plans_by_rank=()) for plan in distinct]

        def branch(call: Call, *args: Any) -> Any:
            # A call with an empty plan returns constants, whose types vary over no axis; branches need equal types.
            return match_varying(function(call, *args), args)

        if len(calls) == 1:
            return branch(calls[0], *args)
        branches = [functools.partial(branch, local_call) for local_call in calls]
        rank = jax.lax.axis_index(self.sequence.axes) if self.sequence and call.plans_by_rank else 0
        device = rank * self.shards + (jax.lax.axis_index(self.axes) if self.axes else 0)
        return jax.lax.switch(jnp.asarray([distinct.index(plan) for plan in plans])[device], branches, *args)


def _mesh(arrays: Any) -> Any:
    """Returns the mesh in force: that of an array's type, or that of `jax.set_mesh`; it may be empty."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def _partition_spec(axes: str, over: dict[str, Any]) -> PartitionSpec:
    """Returns the sharding of an array whose named axes are split over mesh axes."""
    return PartitionSpec(*map(over.get, axes.split()))


def _axis_names(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of an entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def match_varying(arrays: Any, like: Any) -> Any:
    """Marks arrays inside `shard_map` as varying over the mesh axes that one of ``like`` varies over.

    Gradients of replicated operands are then summed over that axis by JAX, and the loops of backends keep one type.
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(like)))

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, arrays)


# --- axes of type Explicit, or that the caller names ----------------------------------------------------------------


def over_known_axes(
    function: Callable[[Shard | None, Operands], Any],
    operands: Operands,
    query_sharding: PartitionSpec | None,
    computed_length: Callable[[int, int, int], int] | None = None,
) -> tuple[Any, Any]:
    """Maps function(shard, operands) -> (out, lse or None) over the devices, each with its batch entries and heads.

    The shard is None if the sharding of the operands is unknown: the mesh in force has no axes of type Explicit, and
    ``query_sharding`` is None. A sequence whose keys are sharded is padded to
    ``computed_length(tokens, devices, query heads of a key head)`` tokens.
    """
    mesh = _mesh(operands)
    over_axes = _explicit_axes(mesh, operands)
    source = "query_sharding" if over_axes is None else "the sharding of query"
    if over_axes is not None:
        batch, tokens, heads, _ = jax.typeof(operands.query).sharding.spec
    elif query_sharding is not None and _is_auto(mesh):
        batch, tokens, heads = _query_axes(mesh, operands.query, query_sharding)
        over_axes = set()
    else:
        return function(None, operands)
    sequence = _sequence_shards(operands, mesh, _axis_names(tokens), source)
    if sequence is not None and sequence.shards_keys and computed_length is not None:
        groups = operands.query.shape[2] // operands.key.shape[2]
        sequence = dataclasses.replace(sequence, length=computed_length(sequence.length, sequence.devices, groups))
    shard = Shard.of(operands, mesh, _axis_names(heads), sequence)
    over = {"b": batch, "n": heads, "k": heads if shard.splits_kv_heads else None}
    length = operands.query.shape[1]
    if sequence is not None:
        over |= {"t": tokens, "r": tokens, "s": tokens if sequence.shards_keys else None}
        operands = _pad_tokens(operands, sequence)
    specs = jax.tree.map(lambda axes: _partition_spec(axes, over), axes_of(operands))
    if AxisType.Explicit in mesh.axis_types:
        operands = jax.tree.map(functools.partial(_reshard, mesh), operands, specs, labels_of(operands))
    by_query = PartitionSpec(batch, tokens, heads)
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs,), out_specs=by_query, axis_names=over_axes)
    results = mapped(functools.partial(function, shard))(operands)
    return results if sequence is None else jax.tree.map(lambda x: x[:, :length], results)


def _sequence_shards(operands: Operands, mesh: Any, axes: tuple[str, ...], source: str) -> SequenceShards | None:
    """Returns how the sequence is sharded over mesh axes; None on one device. Errors name ``source``."""
    devices, (length, kv_len) = math.prod(mesh.shape[axis] for axis in axes), (x.shape[1] for x in operands[:2])
    if devices == 1:
        return None
    if [*axes] != [axis for axis in mesh.axis_names if axis in axes]:  # JAX's ppermute counts devices in that order
        raise ValueError(
            f"{source}: axes of a sequence must be in the order of the mesh, {mesh.axis_names}, got {axes}"
        )
    local_len, granularity = -(-length // devices), _granularity(operands)
    if local_len % granularity:
        raise ValueError(
            f"selection: granularity must divide the {local_len} queries of a device, {length} are spread over "
            f"{devices}, got {granularity}"
        )
    by_pair = any({"t", "s"} <= {*axes.split()} for axes in jax.tree.leaves(axes_of(operands)))
    return SequenceShards(axes, devices, length, length == kv_len and not by_pair)


def _pad_tokens(operands: Operands, sequence: SequenceShards) -> Operands:
    """Pads operands to equally many tokens on each device; padding belongs to no document and selects no block."""
    length = sequence.length + -sequence.length % sequence.devices
    sizes = {"t": length, "r": length // _granularity(operands)} | ({"s": length} if sequence.shards_keys else {})

    def pad(axes: str, x: jax.Array) -> jax.Array:
        widths = [(0, sizes.get(name, size) - size) for name, size in zip(axes.split(), x.shape, strict=True)]
        return jnp.pad(x, widths, constant_values=-1 if x.dtype == jnp.int32 else 0) if any(map(any, widths)) else x

    return jax.tree.map(pad, axes_of(operands), operands)


def _granularity(operands: Operands) -> int:
    """Returns the number of neighbouring queries that select together; 1 without a selection."""
    return 1 if operands.selection is None else operands.selection.granularity


def _query_axes(mesh: Any, query: jax.Array, spec: PartitionSpec) -> tuple[Any, Any, Any]:
    """Returns the mesh axes that ``spec`` names for batch, tokens and heads; for batch and heads, if they divide it."""
    batch, _, heads, _ = _dividing_axes(mesh, query.shape, spec, "query_sharding")
    return batch, ((*spec, None)[1] if len(spec) > 1 else None), heads


def _dividing_axes(mesh: Any, shape: tuple[int, ...], spec: PartitionSpec, name: str) -> list[tuple[str, ...] | None]:
    """Returns the mesh axes in ``spec``, the argument ``name``, for each axis of an array that they divide."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    axes = [a for entry in entries for a in ((entry,) if entry is PartitionSpec.UNCONSTRAINED else _axis_names(entry))]
    if len(entries) > len(shape) or not set(axes) <= set(mesh.axis_names) or len(set(axes)) < len(axes):
        raise ValueError(
            f"{name} must name axes of the mesh, {mesh.axis_names}, each once, for an array of shape {shape}, "
            f"got {spec}"
        )
    devices = [math.prod(mesh.shape[axis] for axis in _axis_names(entry)) for entry in entries]
    return [_axis_names(e) if e and size % n == 0 else None for e, size, n in zip(entries, shape, devices, strict=True)]


def add_batch_axis(spec: PartitionSpec | None, query: jax.Array) -> PartitionSpec | None:
    """Returns the ``query_sharding`` of [B, T, N, H] from that of a query with or without a batch axis."""
    if spec is None:
        return None
    entries, tokens = tuple(spec), query.ndim - 3
    names = ["axes of the batch", "axes of the sequence", "axes of the heads"][1 - tokens :]
    extra_entries = entries[len(names) :]
    if len(extra_entries) > 1 or any(extra_entries) or PartitionSpec.UNCONSTRAINED in entries:
        raise ValueError(
            f"query_sharding must be PartitionSpec({', '.join(names)}) for query of shape {query.shape}, got {spec}"
        )
    return spec if tokens else PartitionSpec(None, *spec)


def check_sharding(spec: Any, name: str) -> None:
    """Raises ValueError if the argument ``name`` is neither a `PartitionSpec` nor None."""
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise ValueError(f"{name} must be a jax.sharding.PartitionSpec or None, got {spec!r}")


def constrained(x: jax.Array, spec: PartitionSpec | None, name: str) -> jax.Array:
    """Returns x with a sharding constraint for the partitioner, if the axes of the mesh in force are Auto."""
    mesh = _mesh(x)
    if spec is None or not _is_auto(mesh):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*_dividing_axes(mesh, x.shape, spec, name)))


def _explicit_axes(mesh: Any, operands: Operands) -> set[str] | None:
    """Returns the axes to map over, as `jax.shard_map` takes them; None if no axis is Explicit."""
    kinds = set(mesh.axis_types)
    if AxisType.Explicit not in kinds:
        return None
    if AxisType.Auto not in kinds:
        # All but those that a `jax.vmap` maps over, which JAX knows: it refuses TPU kernels where some are left.
        return set()
    return {
        axis for x in jax.tree.leaves(operands) for entry in jax.typeof(x).sharding.spec for axis in _axis_names(entry)
    } or None


def _reshard(mesh: Any, x: jax.Array, spec: PartitionSpec, name: str) -> jax.Array:
    """Returns x with the sharding that the op needs: splits a replicated array, refuses one that it had to gather."""
    current = jax.typeof(x).sharding.spec

    def splitting(entry: Any) -> tuple[str, ...]:
        return tuple(axis for axis in _axis_names(entry) if mesh.shape[axis] > 1)

    if any(splitting(now) not in ((), splitting(needed)) for now, needed in zip(current, spec, strict=True)):
        raise ValueError(
            f"{name} must be sharded as {spec}, or replicated, but its sharding is {current}: the op is mapped over "
            "the batch, the tokens and the heads of query, every other axis has to be whole, also that of keys which "
            "are others than the queries' or under a run-time mask, and all arrays are split as query is; change it "
            "by jax.sharding.reshard"
        )
    return x if current == spec else jax.sharding.reshard(x, NamedSharding(mesh, spec))


# --- axes of type Auto -----------------------------------------------------------------------------------------------


def over_auto_axes(function: Callable[..., Any], call: Call, operands: Operands, *by_query: jax.Array) -> Any:
    """Returns a backend's forward, or with ``by_query`` its backward, that JAX's partitioner can split.

    It is split by batch and heads; axes that do not divide these are left out. It is function(call, ...) itself where
    there is nothing to split (one device, no batch entries), where JAX cannot (a mesh of which some axes only are
    Auto), on TPUs, whose compiler does not know custom partitioning, and under `jax.disable_jit`, where there is no
    program to partition.
    """
    mesh = _mesh(operands)
    several = jax.device_count() > 1 if mesh.empty else _is_auto(mesh)
    compiled = not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    if not (several and compiled and operands.query.size) or _on_tpu(mesh):
        return function(call, operands, *by_query)
    return _PartitionedBackend(function, call, ()).mappable(operands, *by_query)


def check_tpu_sharding(operands: Operands) -> None:
    """Raises ValueError on TPUs under a mesh of Auto axes, where the sharding of the operands is unknown.

    It is for calls that are not mapped over devices, by query_sharding or by Explicit axes.
    """
    mesh = _mesh(operands)
    if _is_auto(mesh) and _on_tpu(mesh):
        raise ValueError(
            f"query_sharding must say how query lies on the mesh in force, {mesh.axis_names} of type Auto, as in "
            "PartitionSpec(axes of the batch, None, axes of the heads): the compiler for TPUs cannot split kernels; or "
            "make the axes Explicit, or call the op inside jax.shard_map"
        )


def _is_auto(mesh: Any) -> bool:
    return mesh.size > 1 and set(mesh.axis_types) == {AxisType.Auto}


def _on_tpu(mesh: Any) -> bool:
    device = None if mesh.empty else mesh.abstract_device
    return (platform() if device is None else device.platform) == "tpu"


@dataclasses.dataclass(frozen=True)
class _PartitionedBackend:
    """A backend's forward or backward, and how it is split."""

    function: Callable[..., Any]  # the backend's
    call: Call  # the static part of the call
    # For each `jax.vmap` around it, from the inside out, which of the arguments have an axis for it; it is first.
    maps: tuple[Any, ...]

    def mappable(self, *args: Any) -> Any:
        """Returns the results, also under `jax.vmap` and differentiation, which `custom_partitioning` lacks."""
        mapped = custom_vmap(self.partitioned)

        @mapped.def_vmap
        def rule(_, batched, *args):
            results = dataclasses.replace(self, maps=(*self.maps, tuple(batched))).mappable(*args)
            return results, jax.tree.map(lambda _: True, results)

        # Derivatives (second derivatives of the op) are those of the backend, left to JAX's partitioner. Outside of
        # the rule for vmap, which JAX does not differentiate in reverse mode nor map once more.
        differentiable = jax.custom_jvp(mapped)
        differentiable.defjvp(functools.partial(jax.jvp, functools.partial(self.on_shard, Shard.of(args[0]))))
        return differentiable(*args)

    def partitioned(self, *args: Any) -> Any:
        """Returns the results in a program for any number of devices."""
        # Inside jit, because custom_partitioning takes no function with constants of its own, such as block lists.
        split = custom_partitioning(jax.jit(functools.partial(self.on_shard, Shard.of(args[0]))))
        sides = [jax.tree.leaves(axes) for axes in self.axes(*args)]
        # In the order in which the rule names them, or Shardy refuses it.
        replicated = tuple(axis for axis in dict.fromkeys(" ".join(sides[0]).split()) if axis[0] not in _SPLIT)
        split.def_partition(
            self.partition,
            infer_sharding_from_operands=lambda *args: self.partition(*args)[2],
            sharding_rule=" -> ".join(", ".join(side) for side in sides),
            need_replication_factors=replicated,
        )
        return split(*args)

    def on_shard(self, shard: Shard, *args: Any) -> Any:
        """Returns the results for a device's shard."""
        call_backend = functools.partial(shard.call_backend, self.function, self.call)
        for mapped in self.maps:
            in_axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, mapped)
            call_backend = jax.vmap(call_backend, in_axes)
        return call_backend(*args)

    def axes(self, operands: Operands, *by_query: Any) -> tuple[Any, tuple[str, ...]]:
        """Returns the names of the axes of each argument, and those of each result."""
        of_operands = axes_of(operands)
        args = of_operands, *("b t n", "b t n", "b t n d")[: len(by_query)]
        results = "b t n d", "b t n"
        if by_query:
            results = tuple(getattr(of_operands, name) for name in differentiated(of_operands))
        for i, mapped in enumerate(self.maps):
            args = jax.tree.map(lambda axes, is_mapped, i=i: f"v{i} {axes}" if is_mapped else axes, args, mapped)
            results = tuple(f"v{i} {axes}" for axes in results)
        return args, results

    def partition(self, mesh: Any, args: Any, results: Any) -> tuple[Any, ...]:
        """Returns the mesh, the function of one device, and the shardings of results and of arguments."""
        axes, by_result = self.axes(*args)
        by_result = jax.tree.unflatten(jax.tree.structure(results), by_result)
        over = _split_axes(mesh, args, axes)
        shard = Shard.of(args[0], mesh, over.get("n", ()))
        over["k"] = shard.axes if shard.splits_kv_heads else ()

        def summed(x: jax.Array, names: str) -> jax.Array:
            """Returns a result, summed over the devices that share it if it is the gradient of a shared operand."""
            split = {axis for name in names.split() for axis in over.get(name, ())}
            shared = [axis for axes in over.values() for axis in axes if axis not in split]
            return jax.lax.psum(x, tuple(dict.fromkeys(shared))) if shared else x

        def on_device(*args):
            return jax.tree.map(summed, self.on_shard(shard, *args), by_result)

        def sharding(axes: str) -> NamedSharding:
            return NamedSharding(mesh, _partition_spec(axes, over))

        return mesh, on_device, jax.tree.map(sharding, by_result), jax.tree.map(sharding, axes)


def _split_axes(mesh: Any, args: Any, axes: Any) -> dict[str, tuple[str, ...]]:
    """Returns the mesh axes that split each named axis: those of the first array split there that divide the axis."""
    over: dict[str, tuple[str, ...]] = {}
    sizes: dict[str, int] = {}
    used: set[str] = set()
    for x, names in zip(jax.tree.leaves(args), jax.tree.leaves(axes), strict=True):
        # An array whose sharding is unknown has no sharding, or one without a spec.
        spec = getattr(x.sharding, "spec", ())
        for name, size, entry in zip(names.split(), x.shape, spec, strict=False):
            name = "n" if name == "k" else name
            sizes.setdefault(name, size)  # of all heads that of query, which is first
            if name[0] not in _SPLIT or over.get(name):
                continue
            for axis in _axis_names(entry):
                devices = math.prod(mesh.shape[a] for a in (*over.get(name, ()), axis))
                if axis not in used and sizes[name] % devices == 0:
                    over[name] = (*over.get(name, ()), axis)
                    used.add(axis)
    return over
