"""Biases by distance in the Hopper kernels: the forward kernel adds them to scores, before the scale.

**Accumulators start at the bias.** So the tensor cores add q . k to it, in place of the instructions of an addition.

**A table has an entry for each distance of the pass.** Threads look scores up by distance. In natural order there is
nothing to clip. The segment of the table that a tile needs is short, and stays in the cache.
"""

# Triton compiles these functions, and its types are not those that Python sees.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalSubscript=false
# pyright: reportAssignmentType=false

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .primitives import load_elements
from .tiles import GROUP_ROWS, HopperArrayShapes, RowsView, first_key_row, token_of


class BiasRows(NamedTuple):
    """Numbers of the queries of a group, by which a bias is computed; unused without one."""

    slope: Any  # of the query head, divided by SCALE
    table: Any  # a pointer to the query head's entry of distance 0
    first_row: Any  # of the 64
    token: Any  # [64]


def _adds_bias(A: HopperArrayShapes) -> bool:
    """True if a kernel adds a bias to scores."""
    return A.ALIBI or A.TABLE_LENGTH > 0


adds_bias = gluon.constexpr_function(_adds_bias)


def _needs_key_offsets(A: HopperArrayShapes, Q: RowsView, KV: RowsView) -> bool:
    """True if a kernel reads `allocate_key_offsets`: for slopes, and for a table where tokens are not rows."""
    return A.ALIBI or (A.TABLE_LENGTH > 0 and len(Q.AXES) + len(KV.AXES) > 0)


needs_key_offsets = gluon.constexpr_function(_needs_key_offsets)


@gluon.jit
def load_slope(slopes, pass_head, A: gl.constexpr):
    """Loads the slope of a query head, divided by SCALE; 0 without slopes."""
    slope = 0.0
    if A.ALIBI:
        slope = gl.load(slopes + A.FIRST_HEAD + pass_head * A.HEAD_STEP)
    return slope


@gluon.jit
def load_bias(rows, pass_head, first_row, token, A: gl.constexpr):
    """Returns the `BiasRows` of 64 query rows from the first one on; their tokens are [64]."""
    table = 0
    if A.TABLE_LENGTH > 0:
        head = (A.FIRST_HEAD + pass_head * A.HEAD_STEP).to(gl.int64)
        table = rows.bias_table + (head * A.TABLE_LENGTH + A.TABLE_CENTER)
    return BiasRows(load_slope(rows.slopes, pass_head, A), table, first_row, token)


@gluon.jit
def allocate_key_offsets(N: gl.constexpr, KV: gl.constexpr):
    """Allocates, and writes, the tokens from the first key of a step to each of its N keys."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    row = gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    offsets = gl.allocate_shared_memory(gl.float32, [1, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    offsets.store((token_of(row, KV) - token_of(0, KV)).to(gl.float32)[None, :])
    return offsets


@gluon.jit
def _entries_by_row(bias, first_token, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Loads the entries of the table for 64 neighbouring queries and N neighbouring keys.

    The layout of scores gives a thread two rows, 8 apart, and each eighth pair of columns. So it has one address, and
    offsets from there that the compiler knows. Of scores on one diagonal, it loads one.
    """
    row = gl.arange(0, GROUP_ROWS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    thread_pointer = bias.table + (first_token - bias.first_row) + ((column & 6) - (row & ~8))
    return load_elements(thread_pointer + ((column & ~6) - (row & 8)))


@gluon.jit
def scores_before_products(step, bias, key_offsets, lists, A: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr,
                           N: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Returns scores [64, N] to which q . k is added: 0, entries of a table, or the bias of ALiBi.

    The latter is slope * (key - query), as no query sees a later key, by way of the first key of the step. So near keys
    of a query get a bias that is rounded by no more than 2 ** -23 * slope * the tokens that 128 rows span, whatever the
    length; others by 2 ** -23 of theirs.
    """
    if adds_bias(A):
        first_token = token_of(first_key_row(lists, step, KV, N), KV)
    if A.TABLE_LENGTH > 0:
        if len(Q.AXES) + len(KV.AXES) == 0:  # tokens are rows, and the table has all distances of these
            return _entries_by_row(bias, first_token, N, LAYOUT)
        else:
            distance = (first_token - bias.token)[:, None] + key_offsets.load(LAYOUT).to(gl.int32)
            distance = gl.minimum(gl.maximum(distance, -A.TABLE_CENTER), A.TABLE_LENGTH - 1 - A.TABLE_CENTER)
            return load_elements(bias.table + distance)
    elif A.ALIBI:
        first_bias = (first_token - bias.token).to(gl.float32) * bias.slope
        return first_bias[:, None] + key_offsets.load(LAYOUT) * bias.slope
    else:
        return gl.zeros([GROUP_ROWS, N], gl.float32, LAYOUT)
