"""The adapter of WeatherNext, by a stub of its masks and of its call of splash attention."""

import jax
import numpy as np
import pytest
import scipy.sparse

import sparse_layers as sl
from examples.hosts.weathernext.adapter import mesh_attention
from sparse_layers.tools.oracle import DenseAttention, budgets, largest_error

NODES, HEADS, SIZE, PADDING = 50, 2, 16, (14, 30)
RNG = np.random.default_rng(0)
POINTS = RNG.normal(size=(NODES, 3))
NEAR = ((POINTS[:, None] - POINTS) ** 2).sum(-1) < 1.5


class WeatherMeshMask:
    """The lazy mask of one head: a SciPy matrix."""

    def __init__(self, mask):
        self.mask = mask


class MultiHeadMask:
    """Splash attention's masks of all heads."""

    def __init__(self, masks):
        self.masks = masks


def mask_of(kind, edges=NEAR):
    """A mask with padding, as WeatherNext makes it."""
    matrix = scipy.sparse.csr_matrix(np.pad(edges, [(0, n) for n in PADDING]))
    return MultiHeadMask([WeatherMeshMask(matrix)] * HEADS) if kind == "lazy" else matrix.toarray()


def splash_mha(make_splash_mha, mask, q, k, v, tanh_soft_cap=None):
    """WeatherNext's call: pads nodes, scales queries, maps over the batch and cuts the padding off."""
    pads = [((0, 0), (0, n), (0, 0), (0, 0)) for n in (PADDING[0], PADDING[1], PADDING[1])]
    q, k, v = (
        np.pad(x, pad) if isinstance(x, np.ndarray) else jax.numpy.pad(x, pad)
        for x, pad in zip((q, k, v), pads, strict=True)
    )
    options = dict.fromkeys(("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv"), 128)
    attend = make_splash_mha(mask=mask, mask_type="lazy", num_heads=HEADS, tanh_soft_cap=tanh_soft_cap, **options)
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q * SIZE**-0.5, k, v))
    return jax.vmap(attend)(q=q, k=k, v=v).transpose(0, 2, 1, 3)[:, :NODES]


def arrays():
    """q, k, v and a gradient of the result, [B, nodes, N, H]."""
    return [jax.random.normal(key, (2, NODES, HEADS, SIZE)) for key in jax.random.split(jax.random.key(0), 4)]


@pytest.mark.parametrize("kind", ["lazy", "full"])
@pytest.mark.parametrize("vertices", [None, POINTS], ids=["host's order", "sorted"])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_nodes_attend_along_the_edges(kind, vertices, soft_cap):
    *qkv, dout = arrays()
    make = mesh_attention(vertices)
    out, pullback = jax.vjp(lambda *x: splash_mha(make, mask_of(kind), *x, tanh_soft_cap=soft_cap), *qkv)
    exact, rough = (
        DenseAttention(*qkv, NEAR, dout, soft_cap=soft_cap, dtype=dtype) for dtype in (np.float64, np.float32)
    )
    limits = budgets(exact.answers, rough.answers, exact.root_sum_squares(), np.float32)
    assert 0.1 < NEAR.mean() < 0.5
    for name, x in zip(("out", "dq", "dk", "dv"), (out, *pullback(dout)), strict=True):
        assert largest_error(x, exact.answers[name]) <= limits[name], name


def test_layers_share_a_plan_and_a_new_mask_has_its_own(monkeypatch):
    planned = []
    monkeypatch.setattr(sl, "make_plan", lambda *x, make_plan=sl.make_plan: planned.append(x) or make_plan(*x))
    make, mask = mesh_attention(), mask_of("lazy")
    (q, k, v, _), less = arrays(), NEAR & (np.arange(NODES) < 25)
    first = [splash_mha(make, mask, q, k, v) for _ in range(3)]
    assert len(planned) == 1
    second = splash_mha(make, mask_of("lazy", less | np.eye(NODES, dtype=bool)), q, k, v)
    assert len(planned) == 2 and not np.allclose(first[-1], second)


def test_a_matrix_for_all_heads_is_a_mask():
    q, k, v, _ = arrays()
    matrix = mask_of("lazy").masks[0].mask
    results = [splash_mha(mesh_attention(), x, q, k, v) for x in (matrix, matrix.tocoo(), matrix.toarray())]
    assert np.array_equal(results[0], results[1]) and np.array_equal(results[0], results[2])


def test_stored_zeros_are_no_edges():
    mask = mask_of("lazy")
    zeros = mask.masks[0].mask.copy().astype(np.int32)
    zeros.data[::2] = 0
    sparse, dense = MultiHeadMask([WeatherMeshMask(zeros)] * HEADS), zeros.toarray() != 0
    q, k, v, _ = arrays()
    results = (splash_mha(mesh_attention(), x, q, k, v) for x in (sparse, dense))
    assert np.array_equal(*results)


def test_what_it_does_not_compute_is_refused_by_name():
    q, k, v, _ = arrays()
    different = MultiHeadMask([WeatherMeshMask(scipy.sparse.csr_matrix(NEAR)) for _ in range(HEADS)])
    with pytest.raises(ValueError, match=r"mask must be one WeatherMeshMask for all heads, got .*attention_type="):
        splash_mha(mesh_attention(), different, q, k, v)
    with pytest.raises(ValueError, match=r"mask must have \(64, 80\) queries and keys, .*got \(50, 50\)"):
        splash_mha(mesh_attention(), NEAR, q, k, v)
    with pytest.raises(ValueError, match=r"vertices must be those of the mask, \(64, 80\), got \(100, 3\)"):
        splash_mha(mesh_attention(np.r_[POINTS, POINTS]), mask_of("lazy"), q, k, v)


def mask_by_head():
    return np.stack([mask_of("full")] * HEADS)


@pytest.mark.parametrize(
    ("vertices", "mask", "soft_cap", "words"),
    [
        (None, mask_by_head(), None, r"mask must have \(64, 80\) .*, the same for all heads, got \(2, 64, 80\)"),
        (None, None, None, "mask must be one WeatherMeshMask for all heads, got None"),
        (None, "lazy", None, r"mask must have \(64, 80\) .*got array\('lazy'"),
        (None, mask_of("lazy"), -2, "tanh_soft_cap must be None or positive, got -2"),
        (POINTS[:, :2], mask_of("lazy"), None, r"vertices must be positions \[nodes, 3\], got \(50, 2\)"),
        (6, mask_of("lazy"), None, r"vertices must be positions \[nodes, 3\], got 6"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(vertices, mask, soft_cap, words):
    q, k, v, _ = arrays()
    with pytest.raises(ValueError, match=f"mesh_attention: {words}.*write "):
        splash_mha(mesh_attention(vertices), mask, q, k, v, tanh_soft_cap=soft_cap)
