"""Masks that users write, and what they do with masks: their own rules, tables, huge numbers, pytrees, notebooks."""

import dataclasses
import html
import pickle
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import sparse_layers as sl
from sparse_layers.ops.decoding.cache_parts import plan_cache_parts
from sparse_layers.ops.planning.row_orders import Reordered, RowOrder
from tests.masks.test_masks import COMPUTABLE
from tests.ops.cases import SMALL, candidates

T = 50  # no multiple of any block
DOCUMENTS = np.searchsorted([9, 20, 47], np.arange(T), side="right")
SAME = DOCUMENTS[:, None] == DOCUMENTS
Q = jax.random.normal(jax.random.key(0), (1, T, 2, 8))


def attend(mask, implementation="xla"):
    return sl.block_sparse_attention(Q, Q, Q, mask, implementation=implementation)


def allowed(plan):
    """What the passes of a plan of one mask allow, in token space, from their masks and their lists."""
    total = np.zeros((plan.q_len, plan.kv_len), int)
    for block_pass in plan.chains[0]:
        rows, columns = block_pass.padded(block_pass.fwd_shape)
        q, k = block_pass.q_order.token(np.arange(rows)), block_pass.kv_order.token(np.arange(columns))
        dense = block_pass.mask.dense(rows, columns)
        assert not dense[q >= plan.q_len].any() and not dense[:, k >= plan.kv_len].any()
        total[np.ix_(q[q < plan.q_len], k[k < plan.kv_len])] += dense[np.ix_(q < plan.q_len, k < plan.kv_len)]
    return total


# --- mask_mods -------------------------------------------------------------------------------------------------------

OF_BATCH, ON_DEVICE = np.zeros((2, T), int), jnp.zeros((2, T), int)
LENGTHS, ON_DEVICE_LENGTHS = np.array([3, 9]), jnp.array([3, 9])
OF_ENTRY = {0: 5}

# The ways in which FlexAttention's examples, and ports of them, use one of the two arguments, here x.
USES = {
    "documents": lambda x, q, k: OF_BATCH[x, q] == OF_BATCH[x, k],
    "documents in jax": lambda x, q, k: ON_DEVICE[x, q] == ON_DEVICE[x, k],
    "a row of documents": lambda x, q, k: OF_BATCH[x][q] == OF_BATCH[x][k],
    "a row of documents in jax": lambda x, q, k: ON_DEVICE[x][q] == ON_DEVICE[x][k],
    "offsets": lambda x, q, k: q >= k + LENGTHS[x],
    "offsets in jax": lambda x, q, k: q >= k + ON_DEVICE_LENGTHS[x],
    "padding": lambda x, q, k: LENGTHS[x] > k,
    "padding taken in jax": lambda x, q, k: jnp.take(ON_DEVICE_LENGTHS, x) > k,
    "a dict": lambda x, q, k: q - k < OF_ENTRY[x],
    "a list": lambda x, q, k: [q >= k, q == k][x],
    "a window": lambda x, q, k: q - k <= 4 * (x + 1),
    "a slope": lambda x, q, k: (q - k) * 2.0**-x < 1,
    "an operand of an array": lambda x, q, k: q + x >= k,
    "an operand of a JAX array": lambda x, q, k: jnp.asarray(q) + x >= k,
    "a comparison": lambda x, q, k: (q >= k) & (x == 0),
    "a comparison by numpy": lambda x, q, k: np.greater(q, x) & (k == k),
    "a comparison by jax": lambda x, q, k: jnp.greater(q, x) & (k == k),
    "a condition": lambda x, q, k: q >= k if x else q == k,
    "np.where": lambda x, q, k: np.where(x == 0, q >= k, q == k),
    "jnp.where": lambda x, q, k: jnp.where(x, q >= k, q == k),
    "a number": lambda x, q, k: q - k < int(x),
    "an array": lambda x, q, k: q - k < np.asarray(x),
    "a JAX array": lambda x, q, k: q - k < jnp.asarray(x),
    "an attribute": lambda x, q, k: q - k < x.shape,
    "a set": lambda x, q, k: (q >= k) & (x in {0, 1}),
    "a JAX program": jax.jit(lambda x, q, k: q >= k + x),
}


@pytest.mark.parametrize("traceable", [False, True])
@pytest.mark.parametrize("use", USES)
def test_a_mask_mod_that_uses_b_or_an_unknown_h_is_refused_when_it_is_made(use, traceable):
    with pytest.raises(ValueError, match=r"uses b, .*segment_ids.*known at run time"):
        sl.from_mask_mod(lambda b, h, q, k: USES[use](b, q, k), traceable=traceable)
    with pytest.raises(ValueError, match=r"uses b, .*segment_ids.*known at run time"):
        sl.from_mask_mod(lambda b, h, q, k: (k <= h) & USES[use](b, q, k), heads=2)
    with pytest.raises(ValueError, match=r"uses h, .*from_mask_mod\(mask_mod, heads=number of query heads\)"):
        sl.from_mask_mod(lambda b, h, q, k: USES[use](h, q, k), traceable=traceable)


def test_arguments_that_are_not_used_cost_nothing():
    def window(b, h, q, k):
        return q - k < 4

    wrapped = {
        "called": lambda b, h, q, k: sl.Causal()(q, k) & window(b, h, q, k),
        "compiled": jax.jit(lambda b, h, q, k: (q >= k) & window(b, h, q, k)),
        "packed": lambda *positions: (positions[2] >= positions[3]) & window(*positions),
    }
    for function in wrapped.values():
        np.testing.assert_array_equal(sl.from_mask_mod(function).dense(9), sl.preset("local:local_attn_ctx=4").dense(9))


# --- answers ---------------------------------------------------------------------------------------------------------


class Ruled(sl.Mask):
    """A user's class around a rule (q, k)."""

    computable = False

    def __init__(self, rule):
        object.__setattr__(self, "rule", rule)

    def __call__(self, q, k):
        return self.rule(q, k)


ANSWERS = {
    "integers": (lambda q, k: q - k, r"must return bools \(q >= k, not q - k\), got int64"),
    "floats": (lambda q, k: (q >= k) * 1.0, r"must return bools .*, got float64"),
    "integers of jax": (lambda q, k: jnp.asarray(q >= k, jnp.int32), r"must return bools .*, got int32"),
    "nothing": (lambda q, k: None, r"must return bools .*, got NoneType"),
    "and": (lambda q, k: q >= k and q - k < 3, "write & for 'and'"),
    "or": (lambda q, k: jnp.asarray(q) >= k or k == 0, "write & for 'and', | for 'or'"),
    "not": (lambda q, k: not q < k, "== False for 'not'"),
    "a chain": (lambda q, k: 0 <= q - k < 3, r"\(a <= b\) & \(b < c\) for a <= b < c"),
    "a shape": (lambda q, k: (q >= k)[0], r"of the shape \(.*\) of the positions, got \("),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_rules_answer_in_bools(name):
    rule, message = ANSWERS[name]
    with pytest.raises(TypeError, match=f"mask_mod <lambda>:? .*{message}"):
        sl.from_mask_mod(lambda b, h, q, k: rule(q, k))
    for mask in (Ruled(rule), ~Ruled(rule), sl.Blocks(Ruled(rule), 2), sl.Causal() & Ruled(rule).T):
        with pytest.raises(TypeError, match=f"Ruled:? .*{message}"):
            sl.make_plan(mask, 24)


def test_closed_forms_answer_in_states():
    class Wrong(Ruled):
        def block_state(self, q0, q1, k0, k1):
            return 4 * (q1 >= k0)

    with pytest.raises(TypeError, match=r"Wrong.block_state must return integers 0, 1, 2 or 3, got array"):
        sl.make_plan(Wrong(lambda q, k: q >= k), 24)


# --- tables ----------------------------------------------------------------------------------------------------------


class Documents(sl.Mask):
    """A user's mask with tables as long as the sequence, for its rule and for its closed form."""

    computable = False

    def __call__(self, q, k):
        return DOCUMENTS[q] == DOCUMENTS[k]

    def block_state(self, q0, q1, k0, k1):
        apart = (DOCUMENTS[q0] > DOCUMENTS[k1]) | (DOCUMENTS[k0] > DOCUMENTS[q1])
        alike = (DOCUMENTS[q0] == DOCUMENTS[q1]) & (DOCUMENTS[k0] == DOCUMENTS[k1]) & (DOCUMENTS[q0] == DOCUMENTS[k0])
        return np.where(apart, 0, np.where(alike, 2, 1))


class Looked(Documents):
    """The same by its rule alone."""

    block_state = sl.Mask.block_state


table_of_jax = jnp.asarray(DOCUMENTS)
TABLES = {
    "class": Documents(),
    "class without block_state": Looked(),
    "mask_mod": sl.from_mask_mod(lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k]),
    "mask_mod of jax": sl.from_mask_mod(lambda b, h, q, k: table_of_jax[q] == table_of_jax[k]),
    "traceable mask_mod of jax": sl.from_mask_mod(
        lambda b, h, q, k: table_of_jax[q] == table_of_jax[k], traceable=True
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_padding_is_never_asked(name):
    mask = TABLES[name]
    for plan in candidates(mask & (sl.Window(3, 3) | sl.Strided(7) | sl.Columns(8, 5)), T):
        near = (sl.Window(3, 3) | sl.Strided(7) | sl.Columns(8, 5)).dense(T)
        np.testing.assert_array_equal(allowed(plan), SAME & near)
    if "jax" in name:  # by the same code, but each operation is compiled for each shape
        return
    for plan in candidates(~mask | sl.Prefix(5), T):
        np.testing.assert_array_equal(allowed(plan), ~SAME | (np.arange(T) < 5))
    assert sl.picture(mask, T, size=24) == sl.picture(SAME, T, size=24)
    causal = sl.Causal() & mask
    lines, expected = (sl.describe(x, T).split("\n") for x in (causal, sl.Array(np.tril(SAME))))
    end = next(i for i, line in enumerate(expected) if line.startswith("expected saving"))
    assert lines[1:end] == expected[1:end]
    assert sl.make_plan(causal, T).allows_diagonal


def test_tables_in_the_op_and_in_the_cache():
    masks = [sl.Causal() & TABLES[name] for name in ("class", "traceable mask_mod of jax")]
    np.testing.assert_allclose(attend(masks), attend(np.tril(SAME), "reference"), atol=1e-5)
    for part in plan_cache_parts(masks[0], T):
        tokens = np.asarray(part.store.token(jnp.arange(part.store.num_pages * part.store.page_size), jnp.array(T - 1)))
        pieces, _, seen = part.visible_pages(jnp.array([T - 1]))
        rows = tokens.reshape(part.store.num_pages, -1)[np.asarray(pieces)[0]].ravel()
        np.testing.assert_array_equal(np.sort(rows[np.asarray(seen)[0]]), np.flatnonzero(SAME[-1]))


def test_rules_that_compute_with_jax_serve_the_reference_and_its_gradient():
    documents = jnp.arange(13) // 5
    mask = sl.from_mask_mod(jax.jit(lambda b, h, q, k: (documents[q] == documents[k]) & (jnp.abs(q - k) < 3)))
    x = jax.random.normal(jax.random.key(0), (1, 13, 2, 8))

    def slope(x, mask):
        return jax.grad(lambda x: (sl.block_sparse_attention(x, x, x, mask, implementation="reference") ** 2).sum())(x)

    np.testing.assert_array_equal(jax.jit(slope, static_argnums=1)(x, mask), slope(x, mask.dense(13)))


def test_a_table_that_no_kernel_can_look_up_is_named():
    class Plain(sl.Mask):
        def __call__(self, q, k):
            return DOCUMENTS[q] == DOCUMENTS[k]

    mod = sl.from_mask_mod(lambda b, h, q, k: DOCUMENTS[q] == DOCUMENTS[k], traceable=True)
    for mask, name in ((Plain(), "Plain"), (mod, "mask_mod <lambda>")):
        with pytest.raises(TypeError, match=f"{name}: it looks up a table that is no JAX array.*computable = False"):
            attend(mask)


# --- numbers beyond any length ---------------------------------------------------------------------------------------

HUGE = 2**40
BEYOND = {
    "window": (sl.Window(HUGE), sl.Causal()),
    "window, both": (sl.Window(2**31, HUGE), sl.Full()),
    "prefix": (sl.Prefix(HUGE), sl.Full()),
    "global": (sl.Global(HUGE), sl.Full()),
    "block diagonal": (sl.BlockDiagonal(HUGE), sl.Full()),
    "strided": (sl.Causal() & sl.Strided(HUGE), sl.Window(0)),
    "blocks": (sl.Blocks(~sl.Window(0), HUGE), sl.Empty()),
    "blocks of columns": (sl.Blocks(sl.Columns(2**30, 2**29), 64) | sl.Window(1), sl.Window(1)),
    "columns": (sl.Columns(HUGE, 3), ~sl.Prefix(3)),
    "columns before the end": (sl.Window(2) | sl.Columns(HUGE, 3, 7), sl.Window(2) | (sl.Prefix(7) & ~sl.Prefix(3))),
    "columns at the end": (sl.Window(2) | sl.Columns(HUGE, HUGE - 3), sl.Window(2)),
    "random": (sl.Random(9, seed=HUGE, size=2**31 - 2) & ~sl.Full(), sl.Empty()),
    "preset": (sl.preset("dilated", window=HUGE, dilation=3), sl.Causal() & sl.Strided(3)),
    "deepspeed": (
        sl.from_deepspeed({"mode": "variable", "block": 4, "local_window_blocks": [2, HUGE]}),
        (sl.Prefix(8) & sl.Prefix(8).T) | ~(sl.Prefix(8) | sl.Prefix(8).T) | sl.Prefix(4),
    ),
}


@pytest.mark.parametrize("name", BEYOND)
def test_numbers_beyond_any_length_mean_no_limit(name):
    mask, same = BEYOND[name]
    for plan in candidates(mask, T):
        np.testing.assert_array_equal(allowed(plan), same.dense(T))
    far = 2**31 - 3  # the last position that there can be
    for q, k in ((far, far), (far, 2), (2, far)):
        assert bool(mask(np.array([q]), np.array([k]))[0]) == bool(same(np.array([q]), np.array([k]))[0])
    jax.make_jaxpr(lambda q, k: mask(q, k))(*[jax.ShapeDtypeStruct((1,), jnp.int32)] * 2)  # kernels count in int32


def test_numbers_beyond_any_length_in_the_op():
    masks = [BEYOND["window"][0] & BEYOND["columns before the end"][0], BEYOND["deepspeed"][0]]
    right = attend([sl.Array(mask.dense(T)) for mask in masks], "reference")
    np.testing.assert_allclose(attend(masks), right, atol=1e-5)


# --- dtypes ----------------------------------------------------------------------------------------------------------


def test_masks_compute_under_strict_promotion():
    masks = [*COMPUTABLE.values(), *(mask for name in SMALL for mask in sl.as_masks(sl.preset(name, **SMALL[name])))]
    for order in (RowOrder(29), RowOrder.residue_major(29, 3), RowOrder.periodic(30, 8, 2, 5)):
        masks.append(Reordered(sl.Random(2) | sl.Strided(3), order, order))
    positions = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 1), (1, 5))]
    with jax.numpy_dtype_promotion("strict"):
        for mask in masks:
            assert jax.eval_shape(lambda q, k, mask=mask: mask(q, k), *positions).dtype == bool


# --- names and arrays ------------------------------------------------------------------------------------------------


def test_names_are_taken_wherever_masks_are():
    name, mask = "sliding_window:window=4", sl.Window(3)
    assert sl.as_masks(["causal", name, SAME]) == (sl.Causal(), mask, sl.Array(SAME))
    assert sl.make_plan(name, T) == sl.make_plan(mask, T)
    assert sl.bind(name, 2, T, T) == sl.bind(mask, 2, T, T)
    assert sl.picture(name, T) == sl.picture(mask, T) and sl.describe(name, T) == sl.describe(mask, T)
    assert sl.KVCache.empty(name, T, batch=1, num_heads=2, head_size=8).masks == (mask,)
    np.testing.assert_array_equal(attend(["causal", name]), attend((sl.Causal(), mask)))


def test_arrays_combine_with_masks():
    mask, array = sl.Causal(), sl.Array(SAME)
    assert mask & SAME == mask & array and SAME & mask == array & mask
    assert mask | SAME == mask | array and SAME | mask == array | mask
    np.testing.assert_array_equal((SAME & mask).dense(T), np.tril(SAME))
    for combine in (lambda x: mask & x, lambda x: x & mask, lambda x: mask | x, lambda x: x | mask):
        for x in (jnp.asarray(SAME), "strided", [mask], True):
            with pytest.raises(TypeError, match=r"unsupported operand: .* numpy bool arrays .* run time only"):
                combine(x)
        with pytest.raises(ValueError, match="2-dimensional bool array, got float64"):
            combine(np.ones((3, 3)))


PER_HEAD = sl.preset("fixed", local_attn_ctx=8, num_verts=2, blocksize=2)


@pytest.mark.parametrize("other", [sl.Global(2), SAME, (sl.Window(1), sl.Window(2), sl.Prefix(3))])
def test_masks_per_head_combine_head_by_head(other):
    """Both orders of operands, plain tuples and arrays; 2 and 3 masks take turns together after 6 heads."""
    others = other if isinstance(other, tuple) else (other,)
    lefts, rights = ([np.asarray(m.dense(T) if isinstance(m, sl.Mask) else m) for m in x] for x in (PER_HEAD, others))
    for combined, rule in (
        (PER_HEAD | other, np.logical_or),
        (other | PER_HEAD, np.logical_or),
        (PER_HEAD & other, np.logical_and),
        (other & PER_HEAD, np.logical_and),
        (~(~PER_HEAD & ~(other | PER_HEAD)), np.logical_or),
    ):
        assert len(combined) == (6 if len(others) == 3 else 2)
        for h, mask in enumerate(combined):
            np.testing.assert_array_equal(mask.dense(T), rule(lefts[h % 2], rights[h % len(rights)]))


def test_masks_per_head_are_tuples():
    plain = tuple(PER_HEAD)
    assert (
        type(plain) is tuple and plain == PER_HEAD and hash(plain) == hash(PER_HEAD) and repr(plain) == repr(PER_HEAD)
    )
    assert sl.Global(2) | plain == sl.Global(2) | PER_HEAD and plain & sl.Global(2) == PER_HEAD & sl.Global(2)
    assert jax.tree.leaves(PER_HEAD) == [] and sl.make_plan(PER_HEAD, T) is sl.make_plan(plain, T)
    assert pickle.loads(pickle.dumps(PER_HEAD)) | sl.Global(2) == PER_HEAD | sl.Global(2)
    heads = sl.from_mask_mod(lambda b, h, q, k: q - k <= h, heads=2) & sl.Causal()
    np.testing.assert_array_equal(heads[1].dense(T), sl.Window(1).dense(T))
    np.testing.assert_array_equal(attend(PER_HEAD | sl.Global(2)), attend([m | sl.Global(2) for m in plain]))
    with pytest.raises(ValueError, match="tuple of masks by head must not be empty"):
        sl.Global(2) | ()


# --- fields of classes of one's own ----------------------------------------------------------------------------------


def documents_class(field=None, **options):
    """A mask with a table of documents in a field, as users write it."""

    @dataclasses.dataclass(frozen=True, **options)
    class WithField(sl.Mask):
        ids: object = field or dataclasses.field()
        computable = False

        def __call__(self, q, k):
            ids = np.asarray(self.ids)
            return ids[q] == ids[k]

    return WithField


@pytest.mark.parametrize("value", [DOCUMENTS, DOCUMENTS.tolist(), jnp.asarray(DOCUMENTS)], ids=["numpy", "list", "jax"])
@pytest.mark.parametrize("field", [None, dataclasses.field(hash=False)], ids=["hashed", "compared"])
def test_fields_that_cannot_be_hashed_are_refused(value, field):
    mask = documents_class(field)(value)
    message = f"WithField: field 'ids' must be hashable.* got {type(value).__name__}.*tuple.*eq=False"
    for wrong in (mask, sl.Causal() & ~mask, (sl.Causal(), mask), sl.Grid((5, 10), (sl.Full(), mask))):
        for call in (sl.as_masks, lambda m: sl.make_plan(m, T), lambda m: sl.describe(m, T), attend):
            with pytest.raises(TypeError, match=message):
                call(wrong)


def test_what_the_error_says_to_write_works():
    causal = sl.Causal()
    for mask in (
        documents_class()(tuple(DOCUMENTS.tolist())),
        documents_class(eq=False)(DOCUMENTS),
        documents_class(dataclasses.field(compare=False))(DOCUMENTS),
    ):
        np.testing.assert_allclose(attend(causal & mask), attend(np.tril(SAME), "reference"), atol=1e-5)


def test_a_mask_with_equality_and_no_hash_is_refused():
    class Compared(sl.Window):
        def __eq__(self, other):
            return isinstance(other, Compared)

    with pytest.raises(TypeError, match="Compared: a mask must be hashable: write __hash__ beside __eq__"):
        sl.make_plan(sl.Causal() & Compared(3), T)


def test_reprs_show_arrays_by_dtype_and_shape():
    assert repr(sl.Causal() & SAME) == f"Causal() & Array(array=bool[{T}, {T}])"
    mask = documents_class(eq=False)(DOCUMENTS)
    assert repr(mask).endswith(f"WithField(ids={DOCUMENTS.dtype}[{T}])")
    assert repr(sl.Window(3)) == "Window(left=3, right=0)"


# --- static in pytrees -----------------------------------------------------------------------------------------------


def test_masks_are_static_in_pytrees():
    masks = (sl.Causal() & sl.Window(3), sl.Array(SAME), TABLES["mask_mod"], Documents(), sl.Mask())
    assert jax.tree.leaves((masks, 1)) == [1]
    assert jax.tree.map(lambda x: x + 1, {"mask": masks, "x": 1}) == {"mask": masks, "x": 2}
    traces = []

    @jax.jit
    def dense(mask, q):
        traces.append(mask)
        return mask(q[:, None], q)

    for reach in (3, 3, 4):
        expected = sl.Window(reach).dense(9)
        np.testing.assert_array_equal(dense(sl.Window(reach), jnp.arange(9)), expected)
    assert traces == [sl.Window(3), sl.Window(4)]


def test_masks_are_attributes_of_modules_and_fields_of_dataclasses():
    mask = sl.Causal() & sl.Window(3)

    class Layer(nnx.Module):
        def __init__(self):
            self.pattern, self.patterns, self.scale = mask, (mask, Documents()), nnx.Param(jnp.ones(()))

    graph, state = nnx.split(Layer())
    assert len(jax.tree.leaves(state)) == 1
    merged = nnx.merge(graph, state)
    assert merged.pattern == mask and merged.patterns[0] == mask and isinstance(merged.patterns[1], Documents)

    class Linen(nn.Module):
        pattern: sl.Mask
        patterns: tuple = (mask,)

        @nn.compact
        def __call__(self, x):
            return x * self.param("scale", nn.initializers.ones, ()) * self.pattern(1, 0)

    assert Linen(mask).apply({"params": {"scale": jnp.ones(())}}, 2.0) == 2

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        scale: jax.Array
        mask: sl.Mask

    slope = jax.grad(lambda state: state.scale * state.mask(1, 0))(State(jnp.ones(()), mask))
    assert slope.scale == 1 and slope.mask == mask


# --- in notebooks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask",
    [
        sl.Causal() & sl.Window(3),
        sl.preset("bigbird"),
        sl.preset("strided"),
        sl.Array(SAME[:, :20]),
        TABLES["mask_mod"],
    ],
    ids=["window", "bigbird", "strided", "array", "mask_mod"],
)
def test_notebooks_show_formula_and_picture(mask):
    text = mask._repr_html_()
    assert len(text) < 1 << 15
    figure = xml.etree.ElementTree.fromstring(text.replace("<br>", ""))  # well formed, so what is in it is escaped
    assert figure.find("figcaption/code").text.startswith(repr(mask)[:190])
    lengths = [int(n) for n in figure.find("figcaption").find("code").tail.replace(",", "").split() if n.isdigit()]
    assert lengths == ([50, 20] if isinstance(mask, sl.Array) else lengths) and max(lengths) <= 1 << 14
    paths = {path.get("fill"): path.get("d").split("z")[:-1] for path in figure.findall("svg/path")}
    signs = sl.picture(mask, *lengths).replace(" ", "").splitlines()
    drawn = [["·"] * len(signs[0]) for _ in signs]
    for sign, colour in (("▪", "#8fb3d9"), ("■", "#1f4e8c")):
        for run in paths.get(colour, []):
            place, width = run[1:].split("v")[0].split("h")
            x, y = map(int, place.split())
            drawn[y][x : x + int(width)] = sign * int(width)
    assert ["".join(row) for row in drawn] == signs


def test_a_picture_that_cannot_be_made_leaves_the_formula():
    short = sl.from_mask_mod(lambda b, h, q, k: DOCUMENTS[:3][q] == DOCUMENTS[:3][k])
    text = short._repr_html_()
    assert "svg" not in text and html.escape(repr(short))[:190] in text
    long = sl.Or(*[sl.Columns(97, n) for n in (3, 5)])
    for n in range(90):
        long = long | sl.Window(n)
    assert len(long._repr_html_()) < 1 << 14
