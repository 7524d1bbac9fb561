"""How a call of the op is spread over devices: batches and heads are independent, so each device takes its own.

A sequence may be spread, too: then devices tell each other of keys, see `spread.py`.

A kernel is a program for one device, which JAX cannot split by itself. What it has to be told depends on the mesh:

* On axes of type Explicit, shardings are part of the types of arrays. `over_known_axes` maps the whole op over them
  by `jax.shard_map`, outside its derivative, so that JAX sums the gradients of what devices share.
* On axes of type Auto, shardings are known when the partitioner runs. If the caller says how query lies, that is mapped
  over in the same way; if not, `over_auto_axes` tells the partitioner how to split forward and backward, each by
  itself, for `custom_partitioning` has no derivative.

On axes of type Manual, inside somebody's `jax.shard_map`, arrays are a device's own already.
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

from .kernels.call import Call, Operands
from .kernels.operands import axes_of, by_name, differentiated, rows_of
from .planning.platforms import platform

# Axes that the partitioner splits, and those of `jax.vmap`, v0, v1, ...; see `Operand` for all.
_SPLIT = "b", "n", "k", "v"


# --- one device's share of the heads ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Spread:
    """A sequence that is spread over devices.

    Attributes:
      axes: the mesh axes of these devices, in whose order they have its tokens.
      devices: their number.
      length: tokens that are computed; the arrays have as many on each device, and are longer if need be.
      keys: whether keys are spread as queries are, and not all on each device.
    """

    axes: tuple[str, ...]
    devices: int
    length: int
    keys: bool

    @property
    def first(self) -> jax.Array:
        """A device's first token."""
        return jax.lax.axis_index(self.axes) * -(-self.length // self.devices)

    def gathered(self, x: jax.Array) -> jax.Array:
        """Of all tokens what a device has of its own: [B, n, ...] -> [B, T, ...]."""
        return jax.lax.all_gather(x, self.axes, axis=1, tiled=True)[:, : self.length]


@dataclasses.dataclass(frozen=True)
class Share:
    """A device's share of the heads, and of the tokens.

    Attributes:
      heads: the number of query heads of all devices.
      kv_heads: the number of key heads of all devices. A device holds those of its query heads only if ``shards``
        divides it, and all of them if not.
      shards: the number of devices that the query heads are split over.
      axes: the mesh axes of these devices; the index along them says which share a device has.
      by_key_head: names of the operands with key heads, each with the axis of these.
      spread: how the sequence is spread over devices; None if each has all of it.
    """

    heads: int
    kv_heads: int
    shards: int = 1
    axes: tuple[str, ...] = ()
    by_key_head: tuple[tuple[str, int], ...] = ()
    spread: Spread | None = None

    @staticmethod
    def of(operands: Operands, mesh: Any = None, axes: tuple[str, ...] = (), spread: Spread | None = None) -> "Share":
        """The share of a device if the heads of the operands, those of all devices, are split over mesh axes."""
        shards = math.prod(mesh.shape[axis] for axis in axes)
        arrays = {name: axes for name, axes in axes_of(operands)._asdict().items() if isinstance(axes, str)}
        by_key_head = tuple((name, axes.split().index("k")) for name, axes in arrays.items() if "k" in axes.split())
        return Share(operands.query.shape[-2], operands.key.shape[-2], shards, axes, by_key_head, spread)

    @property
    def splits_keys(self) -> bool:
        """Whether a device holds the key heads of its query heads only."""
        return self.kv_heads % self.shards == 0

    def run(self, function: Callable[..., Any], call: Call, operands: Operands, *by_query: jax.Array) -> Any:
        """A backend's forward, or with ``by_query`` its backward, on a device's arrays; ``call`` is that of all heads.

        If the device holds all key heads, their gradients are still to be summed over the devices.
        """
        if self.splits_keys:
            return self._under_own_masks(function, call, operands, *by_query)
        kv_heads = self.own_kv_heads()
        local = {name: jnp.take(getattr(operands, name), kv_heads, axis=axis) for name, axis in self.by_key_head}
        results = self._under_own_masks(function, call, operands._replace(**local), *by_query)
        if not by_query:
            return results
        wide = by_query[0].dtype
        for name, axis in self.by_key_head:
            if name in differentiated(operands):
                like, heads = getattr(operands, name), (*[slice(None)] * axis, kv_heads)
                gradient = jnp.zeros_like(like, wide).at[heads].add(getattr(results, name).astype(wide))
                results = results._replace(**{name: gradient.astype(like.dtype)})
        return results

    def own_kv_heads(self) -> jax.Array:
        """The key heads that the device's query heads use: one for all of these, or one for each."""
        own, group = self.heads // self.shards, self.heads // self.kv_heads
        return (jax.lax.axis_index(self.axes) * own + jnp.arange(1 if group % own == 0 else own)) // group

    def _under_own_masks(self, function: Callable[..., Any], call: Call, *args: Any) -> Any:
        """function(call, *args) with the plan of the device's heads and place in the call."""
        if call.plan is None:
            return function(call, *args)
        own = self.heads // self.shards
        places = call.places or (call.plan,)
        plans = [plan.of_heads(i * own, own) for plan in places for i in range(self.shards)]
        distinct = list(dict.fromkeys(plans))
        calls = [dataclasses.replace(call, plan=plan, places=()) for plan in distinct]

        def branch(call: Call, *args: Any) -> Any:  # what has nothing to compute makes constants, the same everywhere
            return varying_alike(function(call, *args), args)

        if len(calls) == 1:
            return branch(calls[0], *args)
        branches = [functools.partial(branch, each) for each in calls]
        place = jax.lax.axis_index(self.spread.axes) if self.spread and call.places else 0
        device = place * self.shards + (jax.lax.axis_index(self.axes) if self.axes else 0)
        return jax.lax.switch(jnp.asarray([distinct.index(plan) for plan in plans])[device], branches, *args)


def _mesh(arrays: Any) -> Any:
    """The mesh in force: that of an array's type, or that of `jax.set_mesh`; it may be empty."""
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def _spec(axes: str, over: dict[str, Any]) -> PartitionSpec:
    """How an array is sharded whose named axes are split over mesh axes."""
    return PartitionSpec(*map(over.get, axes.split()))


def _names(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def varying_alike(arrays: Any, like: Any) -> Any:
    """Inside `shard_map`, marks arrays as varying over the mesh axes that one of ``like`` varies over.

    Gradients of replicated operands are then summed over that axis by JAX, and the loops of backends keep one type.
    """
    axes = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(like)))

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(axes - jax.typeof(x).manual_axis_type.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, arrays)


# --- axes of type Explicit, or that the caller names ----------------------------------------------------------------


def over_known_axes(
    function: Callable[[Share | None, Operands], Any],
    operands: Operands,
    query_sharding: PartitionSpec | None,
    together: int = 1,
    length_of: Callable[[int, int, int], int] | None = None,
) -> tuple[Any, Any]:
    """function(share, operands) -> (out, lse or None) on each device, for its own batch entries and heads.

    The share is None if it is not known how the operands lie: the mesh in force has no axes of type Explicit, and
    ``query_sharding`` is None. So many queries choose ``together``, if there is a selection. A sequence whose keys are
    spread, too, is computed as ``length_of(tokens, devices, query heads of a key head)`` tokens.

    Raises:
      ValueError: an axis is sharded that the op is not mapped over, or not as that of the query; query_sharding names
        such an axis, or one that the mesh does not have.
    """
    mesh = _mesh(operands)
    over_axes = _explicit_axes(mesh, operands)
    said = "query_sharding" if over_axes is None else "the sharding of query"
    if over_axes is not None:
        batch, tokens, heads, _ = jax.typeof(operands.query).sharding.spec
    elif query_sharding is not None and _is_auto(mesh):
        batch, tokens, heads = _named(mesh, operands.query, query_sharding)
        over_axes = set()
    else:
        return function(None, operands)
    spread = _spread(operands, mesh, _names(tokens), together, said)
    if spread is not None and spread.keys and length_of is not None:
        groups = operands.query.shape[2] // operands.key.shape[2]
        spread = dataclasses.replace(spread, length=length_of(spread.length, spread.devices, groups))
    share = Share.of(operands, mesh, _names(heads), spread)
    over = {"b": batch, "n": heads, "k": heads if share.splits_keys else None}
    length = operands.query.shape[1]
    if spread is not None:
        over |= {"t": tokens, "r": tokens, "s": tokens if spread.keys else None}
        operands = _padded(operands, spread, together)
    specs = jax.tree.map(lambda axes: _spec(axes, over), axes_of(operands))
    if AxisType.Explicit in mesh.axis_types:
        labels = by_name(operands, {name: row.label for name, row in rows_of(operands).items()})
        operands = jax.tree.map(functools.partial(_placed, mesh), operands, specs, labels)
    by_query = PartitionSpec(batch, tokens, heads)
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs,), out_specs=by_query, axis_names=over_axes)
    found = mapped(functools.partial(function, share))(operands)
    return found if spread is None else jax.tree.map(lambda x: x[:, :length], found)


def _spread(operands: Operands, mesh: Any, axes: tuple[str, ...], together: int, said: str) -> Spread | None:
    """How sequences are spread over mesh axes, as ``said`` by what errors name; None over one device.

    Raises:
      ValueError: axes in another order than the mesh's; queries that choose together would lie on two devices.
    """
    devices, (length, kv_len) = math.prod(mesh.shape[axis] for axis in axes), (x.shape[1] for x in operands[:2])
    if devices == 1:
        return None
    if [*axes] != [axis for axis in mesh.axis_names if axis in axes]:  # JAX's ppermute counts devices in that order
        raise ValueError(f"{said}: axes of a sequence must be in the order of the mesh, {mesh.axis_names}, got {axes}")
    own = -(-length // devices)
    if operands.chosen is not None and own % together:
        raise ValueError(
            f"selection: granularity must divide the {own} queries of a device, {length} are spread over {devices}, "
            f"got {together}"
        )
    by_pair = any({"t", "s"} <= {*axes.split()} for axes in jax.tree.leaves(axes_of(operands)))
    return Spread(axes, devices, length, length == kv_len and not by_pair)


def _padded(operands: Operands, spread: Spread, together: int) -> Operands:
    """Operands with as many tokens on each device; those behind the last belong to no document, and choose nothing."""
    length = spread.length + -spread.length % spread.devices
    sizes = {"t": length, "r": length // together} | ({"s": length} if spread.keys else {})

    def pad(axes: str, x: jax.Array) -> jax.Array:
        widths = [(0, sizes.get(name, size) - size) for name, size in zip(axes.split(), x.shape, strict=True)]
        return jnp.pad(x, widths, constant_values=-1 if x.dtype == jnp.int32 else 0) if any(map(any, widths)) else x

    return jax.tree.map(pad, axes_of(operands), operands)


def _named(mesh: Any, query: jax.Array, spec: PartitionSpec) -> tuple[Any, Any, Any]:
    """The mesh axes that ``spec`` names for batch, tokens and heads; of batch and heads, as far as they divide them."""
    batch, _, heads, _ = _dividing(mesh, query.shape, spec, "query_sharding")
    return batch, ((*spec, None)[1] if len(spec) > 1 else None), heads


def _dividing(mesh: Any, shape: tuple[int, ...], spec: PartitionSpec, name: str) -> list[tuple[str, ...] | None]:
    """The mesh axes that ``spec``, the argument ``name``, names for each axis of an array, if they divide it."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    axes = [axis for entry in entries for axis in ((entry,) if entry is PartitionSpec.UNCONSTRAINED else _names(entry))]
    if len(entries) > len(shape) or not set(axes) <= set(mesh.axis_names) or len(set(axes)) < len(axes):
        raise ValueError(
            f"{name} must name axes of the mesh, {mesh.axis_names}, each once, for an array of shape {shape}, "
            f"got {spec}"
        )
    fits = [
        size % math.prod(mesh.shape[axis] for axis in _names(e)) == 0 for size, e in zip(shape, entries, strict=True)
    ]
    return [_names(entry) if entry and fit else None for entry, fit in zip(entries, fits, strict=True)]


def of_batches(spec: PartitionSpec | None, query: jax.Array) -> PartitionSpec | None:
    """The ``query_sharding`` of [B, T, N, H], by that of a query with or without a batch.

    Raises:
      ValueError: it has entries for other axes than those of the batch, the sequence and the heads.
    """
    if spec is None:
        return None
    entries, tokens = tuple(spec), query.ndim - 3
    names = ["axes of the batch", "axes of the sequence", "axes of the heads"][1 - tokens :]
    others = entries[len(names) :]
    if len(others) > 1 or any(others) or PartitionSpec.UNCONSTRAINED in entries:
        raise ValueError(
            f"query_sharding must be PartitionSpec({', '.join(names)}) for query of shape {query.shape}, got {spec}"
        )
    return spec if tokens else PartitionSpec(None, *spec)


def check_sharding(spec: Any, name: str) -> None:
    """Raises ValueError if the argument ``name`` is neither a `PartitionSpec` nor None."""
    if spec is not None and not isinstance(spec, PartitionSpec):
        raise ValueError(f"{name} must be a jax.sharding.PartitionSpec or None, got {spec!r}")


def constrained(x: jax.Array, spec: PartitionSpec | None, name: str) -> jax.Array:
    """x, of which the partitioner is told how it lies, if the axes of the mesh in force are Auto.

    Raises:
      ValueError: ``spec``, the argument ``name``, names axes that the mesh does not have.
    """
    mesh = _mesh(x)
    if spec is None or not _is_auto(mesh):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*_dividing(mesh, x.shape, spec, name)))


def _explicit_axes(mesh: Any, operands: Operands) -> set[str] | None:
    """The axes to map over, as `jax.shard_map` takes them, or None for none."""
    kinds = set(mesh.axis_types)
    if AxisType.Explicit not in kinds:
        return None
    if AxisType.Auto not in kinds:
        # All but those that a `jax.vmap` maps over, which JAX knows: it refuses TPU kernels where some are left.
        return set()
    return {
        axis for x in jax.tree.leaves(operands) for entry in jax.typeof(x).sharding.spec for axis in _names(entry)
    } or None


def _placed(mesh: Any, x: jax.Array, spec: PartitionSpec, name: str) -> jax.Array:
    """x sharded as the op needs it. What is replicated is cut, what is sharded otherwise is refused, never gathered."""
    given = jax.typeof(x).sharding.spec

    def cut(entry: Any) -> tuple[str, ...]:
        return tuple(axis for axis in _names(entry) if mesh.shape[axis] > 1)

    if any(cut(have) not in ((), cut(want)) for have, want in zip(given, spec, strict=True)):
        raise ValueError(
            f"{name} must be sharded as {spec}, or replicated, but its sharding is {given}: the op is mapped over the "
            "batch, the tokens and the heads of query, every other axis has to be whole, also that of keys which are "
            "others than the queries' or under a run-time mask, and all arrays are split as query is; change it by "
            "jax.sharding.reshard"
        )
    return x if given == spec else jax.sharding.reshard(x, NamedSharding(mesh, spec))


# --- axes of type Auto -----------------------------------------------------------------------------------------------


def over_auto_axes(function: Callable[..., Any], call: Call, operands: Operands, *by_query: jax.Array) -> Any:
    """A backend's forward, or with ``by_query`` its backward, that JAX's partitioner can split by batch and heads.

    Axes that do not divide batch or heads are left out. It is the backend's own where there is nothing to split (one
    device, no batch entries), where JAX cannot (a mesh of which some axes only are Auto), on TPUs, whose compiler
    does not know custom partitioning, and under `jax.disable_jit`, where there is no program to partition.
    """
    mesh = _mesh(operands)
    several = jax.device_count() > 1 if mesh.empty else _is_auto(mesh)
    compiled = not jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]
    if not (several and compiled and operands.query.size) or _on_tpu(mesh):
        return function(call, operands, *by_query)
    return _Partitioned(function, call, ()).mappable(operands, *by_query)


def check_whole(operands: Operands) -> None:
    """Refuses a TPU kernel in a program of several devices that does not know how its operands lie.

    Raises:
      ValueError: the mesh in force has several devices and axes of type Auto.
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
class _Partitioned:
    """A backend's forward or backward, and how it is split.

    Attributes:
      function: the backend's.
      call: the static part of the call.
      maps: for each `jax.vmap` around it, from the inside out, which of the arguments have an axis for it; it is first.
    """

    function: Callable[..., Any]
    call: Call
    maps: tuple[Any, ...]

    def mappable(self, *args: Any) -> Any:
        """The results, also under `jax.vmap` and differentiation, which `custom_partitioning` does not know."""
        mapped = custom_vmap(self.whole)

        @mapped.def_vmap
        def rule(_, batched, *args):
            results = dataclasses.replace(self, maps=(*self.maps, tuple(batched))).mappable(*args)
            return results, jax.tree.map(lambda _: True, results)

        # Derivatives, second ones of the op, are the backend's, left to JAX's partitioner. Outside of the rule for
        # vmap, which JAX does not differentiate in reverse mode nor map once more.
        differentiable = jax.custom_jvp(mapped)
        differentiable.defjvp(functools.partial(jax.jvp, functools.partial(self.run, Share.of(args[0]))))
        return differentiable(*args)

    def whole(self, *args: Any) -> Any:
        """The results, in a program for any number of devices."""
        # Inside jit, for custom_partitioning takes no function with constants of its own, like block lists.
        run = functools.partial(self.run, Share.of(args[0]))
        split = custom_partitioning(jax.jit(run))
        sides = [jax.tree.leaves(axes) for axes in self.axes(*args)]
        # In the order in which the rule names them, or Shardy refuses it.
        held = tuple(axis for axis in dict.fromkeys(" ".join(sides[0]).split()) if axis[0] not in _SPLIT)
        split.def_partition(
            self.partition,
            infer_sharding_from_operands=lambda *args: self.partition(*args)[2],
            sharding_rule=" -> ".join(", ".join(side) for side in sides),
            need_replication_factors=held,
        )
        return split(*args)

    def run(self, share: Share, *args: Any) -> Any:
        """The results of a device's share."""
        run = functools.partial(share.run, self.function, self.call)
        for mapped in self.maps:
            run = jax.vmap(run, jax.tree.map(lambda is_mapped: 0 if is_mapped else None, mapped))
        return run(*args)

    def axes(self, operands: Operands, *by_query: Any) -> tuple[Any, tuple[str, ...]]:
        """The names of the axes of arguments, in their place, and of results, one after the other."""
        own = axes_of(operands)
        args = own, *("b t n", "b t n", "b t n d")[: len(by_query)]
        results = tuple(getattr(own, name) for name in differentiated(own)) if by_query else ("b t n d", "b t n")
        for i, mapped in enumerate(self.maps):
            args = jax.tree.map(lambda axes, is_mapped, i=i: f"v{i} {axes}" if is_mapped else axes, args, mapped)
            results = tuple(f"v{i} {axes}" for axes in results)
        return args, results

    def partition(self, mesh: Any, args: Any, results: Any) -> tuple[Any, ...]:
        """The mesh, what each device computes, and how results and arguments have to be sharded for it."""
        axes, by_result = self.axes(*args)
        by_result = jax.tree.unflatten(jax.tree.structure(results), by_result)
        over = _chosen(mesh, args, axes)
        share = Share.of(args[0], mesh, over.get("n", ()))
        over["k"] = share.axes if share.splits_keys else ()

        def summed(x: jax.Array, names: str) -> jax.Array:
            """The sum over devices that have other batch entries or heads, if it is a gradient of what they share."""
            split = {axis for name in names.split() for axis in over.get(name, ())}
            shared = [axis for axes in over.values() for axis in axes if axis not in split]
            return jax.lax.psum(x, tuple(dict.fromkeys(shared))) if shared else x

        def on_device(*args):
            return jax.tree.map(summed, self.run(share, *args), by_result)

        placed = [jax.tree.map(lambda x: NamedSharding(mesh, _spec(x, over)), side) for side in (by_result, axes)]
        return mesh, on_device, *placed


def _chosen(mesh: Any, args: Any, axes: Any) -> dict[str, tuple[str, ...]]:
    """The mesh axes to split each named axis over: as the first array that is split there, as far as they divide it."""
    over: dict[str, tuple[str, ...]] = {}
    sizes: dict[str, int] = {}
    used: set[str] = set()
    for x, names in zip(jax.tree.leaves(args), jax.tree.leaves(axes), strict=True):
        # An array that nothing is known of has no sharding, or none with names.
        spec = getattr(x.sharding, "spec", ())
        for name, size, entry in zip(names.split(), x.shape, spec, strict=False):
            name = "n" if name == "k" else name
            sizes.setdefault(name, size)  # of all heads that of query, which is first
            if name[0] not in _SPLIT or over.get(name):
                continue
            for axis in _names(entry):
                together = math.prod(mesh.shape[a] for a in (*over.get(name, ()), axis))
                if axis not in used and sizes[name] % together == 0:
                    over[name] = (*over.get(name, ()), axis)
                    used.add(axis)
    return over
