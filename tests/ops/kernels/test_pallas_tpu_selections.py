"""Blocks chosen at run time in the TPU kernels, interpreted: values and gradients against float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_layers as sl
from sparse_layers.ops import attention
from sparse_layers.ops.kernels import pallas_tpu
from sparse_layers.ops.kernels.call import Call, Operands
from sparse_layers.ops.kernels.pallas_tpu import schedule
from sparse_layers.ops.kernels.pallas_tpu.schedule import Steps
from sparse_layers.ops.planning.params import checked_params
from tests.ops.cases import Case, _named, check, compiled


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen(Case):
    """A call with a selection. Some ids are padding, no block, or there twice."""

    block: int = 16
    granularity: int = 16
    lists: int = 1  # G
    k: int = 3

    @property
    def ids(self) -> np.ndarray:
        t, s = self.shape
        shape = self.batch, -(-t // self.granularity), self.lists, self.k
        return np.random.default_rng(1).integers(-1, -(-s // self.block) + 1, shape).astype(np.int32)

    def allowed(self) -> np.ndarray:
        t, s = self.shape
        blocks = np.zeros((*self.ids.shape[:3], -(-s // self.block) + 2), bool)  # the last two are no blocks
        np.put_along_axis(blocks, self.ids, True, axis=-1)
        pairs = blocks[..., :-2].repeat(self.granularity, axis=1)[:, :t].repeat(self.block, axis=-1)[..., :s]
        return super().allowed() & np.moveaxis(pairs, 2, 1).repeat(self.heads[0] // self.lists, axis=1)

    def call(self, implementation: str) -> dict[str, np.ndarray]:
        return compiled(functools.partial(self.answers, implementation))(self.arrays(), self.ids, self.segments)

    def answers(self, implementation: str, arrays: dict[str, Any], ids: Any, segments: Any) -> dict[str, Any]:
        """The answers by name, to be traced."""
        mask = self.mask.reshape(-1, *self.shape) if isinstance(self.mask, jax.Array) else None
        plan = None if mask is not None else sl.make_plan(self.mask, *self.shape)
        params, shape = checked_params(**{"fwd_params": None, "bwd_params": None} | self.params()), (16, 16)
        selection = self.block, self.granularity
        call = Call(plan, shape, shape, params, self.sizes[0] ** -0.5, self.soft_cap, selection=selection)

        def op(query, key, value, sinks):
            return attention._attend(
                implementation, call, None, Operands(query, key, value, sinks, segments, mask, ids)
            )

        (out, lse), pullback = jax.vjp(op, *(arrays[x] for x in ("query", "key", "value", "sinks")))
        return _named((out, lse, *pullback((arrays["dout"], arrays["dlse"]))))


T = 75
IDS = np.repeat([[0, 0, 1, 1, -1], [0, 1, 2, 2, 2]], 15, axis=1)
TABLE = np.random.default_rng(0).random((2, T, T)) < 0.5
CASES = [
    Chosen("causal", sl.Causal(), T, fwd=(32, 16), bwd=(64, 16), sinks=True),
    Chosen("key heads", sl.Causal(), T, lists=2, segments=(IDS, IDS), fwd=(64, 16), bwd=(16, 16), soft_cap=3.0),
    Chosen("query heads", sl.Full(), T, 60, lists=4, dtype="bfloat16", sizes=(16, 8)),
    Chosen("masks in turn", (sl.Causal(), sl.Window(20, 20)), T, heads=(4, 1), lists=4, batch=1),
    Chosen("masks in turn, key heads", (sl.Causal(), sl.Array(TABLE[0])), T, heads=(4, 2), lists=2, block=32),
    Chosen("run-time masks", jnp.asarray(TABLE.repeat(2, axis=0)), T, lists=2, batch=1, fwd=(32, 16)),
    Chosen("64 together", sl.Causal(), 150, granularity=64, block=32, heads=(2, 2), fwd=(128, 16)),
    Chosen("nothing", sl.Full(), 40, k=0, sinks=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_selections(case):
    check(case, case.call("pallas_tpu"))


def test_vmap():
    case = Chosen("vmap", sl.Causal(), T, lists=2, heads=(2, 2), batch=2)
    arrays, ids = case.arrays(), case.ids
    one = functools.partial(case.answers, "pallas_tpu")
    found = compiled(jax.vmap(lambda x, i: one(jax.tree.map(lambda a: a[None], x), i[None], None)))(arrays, ids)
    check(case, {name: x[:, 0] for name, x in found.items()})


def test_choices_of_single_queries_are_refused():
    shapes: Any = [jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)] * 3
    call = Call(
        sl.make_plan("causal", 64), (16, 16), (16, 16), checked_params(None, None), 1.0, None, selection=(32, 1)
    )
    reason = pallas_tpu.unsupported(call, Operands(*shapes))
    assert reason is not None and "granularity 1 " in reason and "at least 16" in reason
    assert pallas_tpu.unsupported(dataclasses.replace(call, selection=(32, 16)), Operands(*shapes)) is None


@pytest.mark.parametrize(
    ("case", "fits"),
    [
        (Chosen("by entry", sl.Causal(), T, segments=(IDS, IDS), fwd=(64, 16)), 80),
        (Chosen("by entry and key head", sl.Causal(), T, lists=4, sinks=True, fwd=(64, 16)), 160),
    ],
    ids=str,
)
def test_lists_that_do_not_fit_together_take_turns(case, fits, monkeypatch):
    sizes, of = [], Steps.of

    def recorded(*args):
        steps = of(*args)
        sizes.append(sum(x.size * 4 for x in steps.scalars))
        return steps

    monkeypatch.setattr(Steps, "of", recorded)
    monkeypatch.setattr(schedule, "SMEM_BYTES", fits)
    check(case, case.call("pallas_tpu"))
    assert set(sizes) == {fits}
    monkeypatch.setattr(schedule, "SMEM_BYTES", fits - 1)
    with pytest.raises(ValueError, match=r"lists of 10 steps, which take \d+ bytes of scalar memory, and \d+ are"):
        jax.eval_shape(functools.partial(case.answers, "pallas_tpu"), case.arrays(), case.ids, case.segments)
