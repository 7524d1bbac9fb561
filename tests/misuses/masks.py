"""Misuses of masks, presets, adapters and DeepSpeed's configurations."""

import jax
import jax.numpy as jnp

import sparse_layers as sl
from tests.misuse import Misuse

NUMBER, COUNT = "must be an integer >= 0", "must be an integer >= 1"
OPERAND = "a mask combines with masks, tuples of masks by head and numpy bool arrays [T, S]"
SHAPES = "a numpy bool array [T, S] or [H, T, S]"
HEADS = "from_mask_mod(mask_mod, heads=number of query heads)"
ALONE = "known at run time only"


class Distance(sl.Mask):
    """Forgets to compare."""

    def __call__(self, q, k):
        return q - k


class Mapped(sl.Mask):
    """Asks for positions one by one."""

    def __call__(self, q, k):
        return jax.vmap(lambda q, k: q >= k)(q, k)


class Chained(sl.Mask):
    """Compares as one does numbers."""

    def __call__(self, q, k):
        return 0 <= q - k < 3


def names():
    return {
        "mod": lambda b, h, q, k: q >= k,
        "traced": lambda function: jax.jit(lambda x: function(x) and 0)(jnp.ones((32, 32), bool)),
        "Distance": Distance,
        "Mapped": Mapped,
        "Chained": Chained,
    }


MISUSES = [
    # Primitives
    Misuse("sl.Window(-1)", ValueError, "Window: left", "-1", NUMBER),
    Misuse("sl.Window('3')", ValueError, "Window: left", "'3'", NUMBER),
    Misuse("sl.Window(True)", ValueError, "Window: left", "True", NUMBER),
    Misuse("sl.Window(np.bool_(True))", ValueError, "Window: left", "True", NUMBER),
    Misuse("sl.Window(3.0)", ValueError, "Window: left", "3.0", NUMBER),
    Misuse("sl.Window([3])", ValueError, "Window: left", "[3]", NUMBER),
    Misuse("sl.Window(np.array([3, 4]))", ValueError, "Window: left", "array([3, 4])", NUMBER),
    Misuse("sl.Window(jnp.array([3]))", ValueError, "Window: left", "Array([3]", NUMBER),
    Misuse("sl.Window(None, -2)", ValueError, "Window: right", "-2", "or None"),
    Misuse("sl.Strided(0)", ValueError, "Strided: stride", "got 0", COUNT),
    Misuse("sl.Strided(None)", ValueError, "Strided: stride", "None", COUNT),
    Misuse("sl.BlockDiagonal(2.5)", ValueError, "BlockDiagonal: size", "2.5", COUNT),
    Misuse("sl.Columns('4', 1)", ValueError, "Columns: period", "'4'", COUNT),
    Misuse("sl.Columns(4, -1)", ValueError, "Columns: start", "-1", NUMBER),
    Misuse("sl.Columns(4, 4)", ValueError, "Columns", "start=4, stop=4, period=4", "0 <= start < stop <= period"),
    Misuse("sl.Prefix(None)", ValueError, "Prefix: size", "None", NUMBER),
    Misuse("sl.Global(False)", ValueError, "Global: size", "False", NUMBER),
    Misuse("sl.Random(0)", ValueError, "Random: count", "got 0", COUNT),
    Misuse("sl.Random(2**40)", ValueError, "Random: count", str(2**40), "at most 32768"),
    Misuse("sl.Random(3, size=2**40)", ValueError, "Random: size", str(2**40), "at most 2147483646"),
    Misuse("sl.Random(3, size=0)", ValueError, "Random: size", "got 0", "or None"),
    Misuse("sl.Random(3, seed=0.5)", ValueError, "Random: seed", "0.5", "must be an integer"),
    # The algebra
    Misuse("sl.Blocks(sl.Causal(), 0)", ValueError, "Blocks: block", "got 0", COUNT),
    Misuse("sl.Blocks(sl.Causal(), (4, -1))", ValueError, "Blocks: block", "got (4, -1)", "or a pair of these"),
    Misuse("sl.Blocks(sl.Causal(), (4, 4, 4))", ValueError, "Blocks: block", "got (4, 4, 4)", "or a pair of these"),
    Misuse("sl.Blocks('causal', 4)", TypeError, "Blocks: mask", "'causal'", "must be a mask"),
    Misuse("sl.And(sl.Causal(), 3)", TypeError, "And: right", "got 3", "must be a mask"),
    Misuse("sl.Not(None)", TypeError, "Not: mask", "None", "must be a mask"),
    Misuse("sl.Causal() & True", TypeError, "unsupported operand", "bool", OPERAND),
    Misuse("sl.Causal() | 'strided'", TypeError, "unsupported operand", "str", "preset makes one of a name"),
    Misuse("sl.Causal() & [sl.Full()]", TypeError, "unsupported operand", "list", OPERAND),
    Misuse("sl.Causal() & jnp.ones((3, 3), bool)", TypeError, "unsupported operand", "Array", ALONE),
    Misuse("jnp.ones((3, 3), bool) | sl.Causal()", TypeError, "unsupported operand", "Array", ALONE),
    Misuse("sl.Causal() & np.ones((3, 3))", ValueError, "Array", "float64 of shape (3, 3)", "2-dimensional bool array"),
    Misuse("sl.Array(np.ones((2, 2, 2), bool))", ValueError, "Array", "(2, 2, 2)", "2-dimensional bool array"),
    Misuse("sl.Array([[1, 0], [0, 1]])", ValueError, "Array", "int64", "2-dimensional bool array"),
    Misuse("traced(sl.Array)", TypeError, "mask", "bool[32,32]", ALONE),
    Misuse("sl.Causal() and sl.Full()", TypeError, "a mask has no truth value", "'and'", "with &, | and ~"),
    Misuse("sl.Causal().dense(-1)", ValueError, "dense: length", "-1", COUNT),
    Misuse("sl.Causal().dense(3.0)", ValueError, "dense: length", "3.0", COUNT),
    # Rules of the user's
    Misuse("Distance().dense(3)", TypeError, "Distance", "int64", "must return bools (q >= k, not q - k)"),
    Misuse("(~Distance()).dense(3)", TypeError, "Distance", "int64", "must return bools (q >= k, not q - k)"),
    Misuse("sl.make_plan(Chained(), 32)", TypeError, "Chained", "a <= b < c", "(a <= b) & (b < c)"),
    Misuse("sl.MaskMod(3)", TypeError, "MaskMod: function", "got 3", "must be a mask_mod(b, h, q, k)"),
    Misuse("sl.MaskMod(lambda q, k: q >= k)", TypeError, "function", "<lambda>(q, k)", "must take (b, h, q, k)"),
    Misuse("sl.MaskMod(mod, -1)", ValueError, "MaskMod: head", "-1", NUMBER),
    Misuse("sl.MaskMod(mod, 0, 'yes')", ValueError, "MaskMod: traceable", "'yes'", "must be true or false"),
    Misuse(
        "sl.from_csr(np.array([0, 2, 1]), np.array([0, 1]))", ValueError, "from_csr: indptr", "2 and then 1", "decrease"
    ),
    Misuse(
        "sl.from_csr(np.array([1, 2]), np.array([0, 1]))", ValueError, "from_csr: indptr", "got [1]", "begin with 0"
    ),
    Misuse(
        "sl.from_csr(np.array([0, 1]), np.array([0, 0]))", ValueError, "indptr", "got 1", "the number of indices, 2"
    ),
    Misuse("sl.from_csr(np.zeros(0, int), np.zeros(0, int))", ValueError, "indptr", "got []", "begin with 0"),
    Misuse("sl.from_csr(np.array([0, 1]), np.array([3]))", ValueError, "indices", "got 3 to 3", "as many as queries"),
    Misuse(
        "sl.from_csr(np.array([0, 1]), np.array([-1]), 4)", ValueError, "indices", "got -1", "from 0 to 3, for 4 keys"
    ),
    Misuse(
        "sl.from_csr(np.array([0, 1]), np.array([0]), 2.5)", ValueError, "num_keys", "got 2.5", "must be an integer"
    ),
    Misuse("sl.from_csr(np.array([0.0, 1.0]), np.array([0]))", TypeError, "indptr", "float64", "vector of integers"),
    Misuse(
        "sl.from_csr(np.array([0, 1]), np.array([True]))",
        TypeError,
        "indices",
        "bool of shape (1,)",
        "vector of integers",
    ),
    Misuse(
        "sl.from_csr(np.array([0, 1]), jnp.array([0]))", TypeError, "indices", "int32 of shape (1,)", "numpy vector"
    ),
    Misuse("sl.spatial_order(np.zeros(3))", ValueError, "spatial_order: points", "(3,)", "[nodes, axes]"),
    Misuse(
        "sl.spatial_order(np.full((3, 2), np.nan))", ValueError, "spatial_order: points", "(3, 2)", "finite numbers"
    ),
    Misuse("sl.spatial_order(np.zeros((3, 2)), block=0)", ValueError, "spatial_order: block", "got 0", COUNT),
    Misuse("sl.from_csr(np.eye(3))", TypeError, "from_csr: indptr", "ndarray", "a SciPy matrix in CSR format"),
    Misuse("sl.from_mask_mod(sl.Causal())", TypeError, "function", "Causal()(q, k)", "must take (b, h, q, k)"),
    Misuse("sl.from_mask_mod(mod, heads=0)", ValueError, "from_mask_mod: heads", "got 0", COUNT),
    Misuse("sl.from_mask_mod(mod, heads=True)", ValueError, "from_mask_mod: heads", "True", COUNT),
    Misuse("sl.from_mask_mod(mod, heads='4')", ValueError, "from_mask_mod: heads", "'4'", COUNT),
    Misuse("sl.from_mask_mod(lambda b, h, q, k: q - k)", TypeError, "mask_mod <lambda>", "int64", "must return bools"),
    Misuse(
        "sl.from_mask_mod(lambda b, h, q, k: None)", TypeError, "mask_mod <lambda>", "NoneType", "must return bools"
    ),
    Misuse("sl.from_mask_mod(lambda b, h, q, k: q >= k + b)", ValueError, "<lambda>", "uses b", "segment_ids"),
    Misuse("sl.from_mask_mod(lambda b, h, q, k: q - k <= h)", ValueError, "<lambda>", "uses h", HEADS),
    Misuse("sl.from_mask_mod(lambda b, h, q, k: q >= k and k > 0)", TypeError, "<lambda>", "'and'", "write &"),
    Misuse("sl.from_mask_mod(jax.vmap(mod, (0, None, None, None)))", TypeError, "mask_mod", "vmap must have", "no b"),
    Misuse("sl.from_mask_mod(jax.vmap(mod, (None, 0, None, None)), heads=2)", TypeError, "mask_mod", "rank", "one h"),
    Misuse("Mapped().dense(4)", TypeError, "Mapped", "vmap got inconsistent sizes", "positions q and k that broadcast"),
    # Whatever describes a mask
    Misuse("sl.as_masks(None)", TypeError, "mask must be", "None", SHAPES),
    Misuse("sl.as_masks(3)", TypeError, "mask must be", "int: 3", SHAPES),
    Misuse("sl.as_masks(sl.Causal)", TypeError, "mask must be", "Causal'>", SHAPES),
    Misuse("sl.as_masks(mod)", TypeError, "mask must be", "function", "from_mask_mod makes one of a function"),
    Misuse("sl.as_masks([[True, False], [True, True]])", TypeError, "mask must be", "bool: True", SHAPES),
    Misuse("sl.as_masks(b'strided')", TypeError, "mask must be", "b'strided'", "a preset's name"),
    Misuse("sl.as_masks({'a': sl.Causal()})", TypeError, "mask must be", "dict", "a sequence of these"),
    Misuse("sl.as_masks(())", ValueError, "mask: a sequence of masks", "got ()", "must not be empty"),
    Misuse("sl.as_masks(['causal', None])", TypeError, "mask must be", "None", SHAPES),
    Misuse("sl.as_masks(np.ones(2, bool))", ValueError, "mask: an array", "(2,)", "[T, S] or [H, T, S]"),
    Misuse("sl.as_masks(np.ones((0, 2, 2), bool))", ValueError, "mask: an array", "(0, 2, 2)", "[T, S] or [H, T, S]"),
    Misuse("sl.as_masks(jnp.ones((2, 2)))", ValueError, "Array", "float32", "2-dimensional bool array"),
    Misuse("traced(lambda x: sl.as_masks([sl.Causal(), x]))", TypeError, "mask", "bool[32,32]", ALONE),
    Misuse("sl.as_masks('dense')", ValueError, "unknown name", "'dense'", "'causal' to some and 'bidirectional'"),
    Misuse("sl.as_masks('stridde')", ValueError, "unknown name", "'stridde'", "did you mean 'strided'"),
    # Masks of masks, and of tokens with coordinates
    Misuse("sl.Shifted(sl.Causal(), -1)", ValueError, "Shifted: by", "-1", NUMBER),
    Misuse("sl.Shifted('causal', 1)", TypeError, "Shifted: mask", "'causal'", "must be a mask"),
    Misuse("sl.Rectangle('causal')", TypeError, "Rectangle: mask", "'causal'", "must be a mask"),
    Misuse("sl.Rectangle(sl.Causal(), q_start=-1)", ValueError, "Rectangle: q_start", "got -1", NUMBER),
    Misuse("sl.Rectangle(sl.Causal(), kv_start=1.5)", ValueError, "Rectangle: kv_start", "got 1.5", NUMBER),
    Misuse("sl.Rectangle(sl.Causal(), kv_len=0)", ValueError, "Rectangle: kv_len", "got 0", COUNT),
    Misuse(
        "sl.make_plan(sl.Rectangle(sl.Array(np.eye(4, dtype=bool)), q_start=2), 8, 4)",
        ValueError,
        "an Array must cover (6, 4)",
        "got (4, 4)",
        "must cover",
    ),
    Misuse("sl.ColumnMajor(0, 4, sl.Full())", ValueError, "ColumnMajor: rows", "got 0", COUNT),
    Misuse("sl.ColumnMajor(4, 4, None)", TypeError, "ColumnMajor: mask", "None", "must be a mask"),
    Misuse("sl.ColumnMajor(4, 4, sl.Neighborhood(8, 3))", ValueError, "ColumnMajor: mask", "length=8", "axis, 16"),
    Misuse("sl.ColumnMajor(4, 4, sl.Full(), -1)", ValueError, "ColumnMajor: offset", "-1", NUMBER),
    Misuse("sl.ColumnMajor(2**20, 2**20, sl.Full())", ValueError, "rows * columns", "1048576 * 1048576", "at most"),
    Misuse("sl.Radial(4, 2.5)", ValueError, "Radial: places", "2.5", COUNT),
    Misuse("sl.Radial(2**20, 2**20)", ValueError, "frames * places", "1048576 * 1048576", "at most"),
    # Presets
    Misuse("sl.preset(None)", ValueError, "preset: name", "None", "must be a string"),
    Misuse("sl.preset('strided:64')", ValueError, "options", "'64'", "must be option=value"),
    Misuse(
        "sl.preset('local:local_attn_ctx=64', local_attn_ctx=32)",
        ValueError,
        "local_attn_ctx",
        "'local_attn_ctx=64' and 32",
        "must be given once",
    ),
    Misuse("sl.preset('strided', stride=4)", ValueError, "unknown option", "'stride'", "Known: local_attn_ctx"),
    Misuse("sl.preset('strided', local_attn_ctx='64')", ValueError, "local_attn_ctx", "'64'", COUNT),
    Misuse("sl.preset('longformer', causal=1)", ValueError, "causal", "got 1", "must be true or false"),
    Misuse("sl.preset('bigbird', random_blocks=2**20)", ValueError, "random_blocks", "1048576", "at most 32768"),
    Misuse("sl.preset('bigbird', seq_len=100)", ValueError, "seq_len", "100", "block=64 must divide"),
    Misuse("sl.preset('bigbird', seq_len=2**40)", ValueError, "seq_len", str(2**40), "at most 2147483646"),
    Misuse("sl.preset('radial')", ValueError, "'radial': shape", "radial:shape=64x64", "must be given"),
    Misuse(
        "sl.preset('block_diffusion')", ValueError, "'block_diffusion': n", "block_diffusion:n=4096", "must be given"
    ),
    Misuse("sl.preset('block_diffusion:n=0')", ValueError, "'block_diffusion': n", "got 0", COUNT),
    Misuse("sl.preset('block_diffusion:n=64,block_size=0')", ValueError, "block_size", "got 0", COUNT),
    Misuse("sl.preset('block_diffusion:n=64,block=4')", ValueError, "unknown option", "'block'", "'block_size'"),
    Misuse("sl.preset('draft_blocks:stride=8')", ValueError, "'draft_blocks': total_seq_len", "=4096", "must be given"),
    Misuse("sl.preset('draft_blocks:total_seq_len=64,stride=0')", ValueError, "stride", "got 0", COUNT),
    Misuse("sl.preset('draft_blocks:total_seq_len=64,block_size=1.5')", ValueError, "block_size", "'1.5'", COUNT),
    Misuse("sl.preset('axial', shape=(4, 0))", ValueError, "'axial': shape[1]", "got 0", COUNT),
    Misuse("sl.preset('axial', shape=4.5)", ValueError, "'axial': shape", "4.5", COUNT),
    Misuse("sl.preset('axial:shape=4x')", ValueError, "'axial': shape", "'4x'", COUNT),
    Misuse("sl.preset('axial', shape=())", ValueError, "shape", "()", "must be"),
    Misuse("sl.preset('axial', shape=(2**20, 2**20))", ValueError, "shape", "(1048576, 1048576)", "at most 2147483646"),
    Misuse("sl.preset('axial:shape=4x4,axes=2')", ValueError, "axial: axes", "got 2", "some of the 2 axes"),
    Misuse("sl.preset('axial', shape=(4, 4), axes=())", ValueError, "axial: axes", "()", "some of the 2 axes"),
    Misuse("sl.preset('local:local_attn_ctx=2x3')", ValueError, "local_attn_ctx", "(2, 3)", COUNT),
    Misuse(
        "sl.preset('neighborhood', shape=(9, 9), kernel=(3, 3, 3))",
        ValueError,
        "neighborhood: kernel",
        "(3, 3, 3)",
        "one for each axis of shape=(9, 9)",
    ),
    Misuse(
        "sl.preset('neighborhood:shape=9x9,kernel=3,causal=1')",
        ValueError,
        "'neighborhood': causal",
        "got 1",
        "must be true or false",
    ),
    Misuse("sl.preset('neighborhood:shape=9x5')", ValueError, "Neighborhood: kernel", "7 * 1 > 5", "at most length"),
    Misuse("sl.preset('sliding_tile:shape=64x64,kernel=4')", ValueError, "kernel", "got 4", "at most the 8 tiles"),
    Misuse("sl.preset('sliding_tile:shape=64x9')", ValueError, "sliding_tile: kernel", "got 3", "at most the 2 tiles"),
    Misuse("sl.preset('windows:shape=9x9,shift=7')", ValueError, "windows: shift", "7 and 7", "less than size"),
    Misuse("sl.preset('image_strided:shape=64')", ValueError, "image_strided: shape", "(64,)", "two axes at least"),
    Misuse("sl.preset('image_fixed:shape=9x5')", ValueError, "summary=8", "5 tokens", "must not exceed"),
    Misuse("sl.preset('radial:shape=9x5,offset=-1')", ValueError, "'radial': offset", "got -1", NUMBER),
    Misuse(
        "sl.preset('spatial_temporal:shape=9x4x4')",
        ValueError,
        "block=128",
        "= 32",
        "must not exceed multiplier * height * width",
    ),
    Misuse("sl.preset_options('dense')", ValueError, "unknown name", "'dense'", "'causal'"),
    Misuse("sl.preset_options(None)", ValueError, "preset_options: name", "None", "must be a string"),
    # DeepSpeed's configurations
    Misuse("sl.from_deepspeed(None)", ValueError, "config", "None", "a dict or a JSON object"),
    Misuse("sl.from_deepspeed({3: 4})", ValueError, "unknown key", "'3'", "Known: attention, block"),
    Misuse("sl.from_deepspeed({'mode': ['fixed']})", ValueError, "unknown mode", "['fixed']", "did you mean 'fixed'"),
    Misuse("sl.from_deepspeed({'block': True})", ValueError, "from_deepspeed: block", "True", COUNT),
    Misuse(
        "sl.from_deepspeed({'mode': 'bigbird', 'num_random_blocks': 2**40})",
        ValueError,
        "from_deepspeed: num_random_blocks",
        str(2**40),
        "at most 32768",
    ),
    Misuse("sl.from_deepspeed({}, num_heads='4')", ValueError, "from_deepspeed: num_heads", "'4'", COUNT),
    Misuse("sl.from_deepspeed({}, seq_len=100)", ValueError, "seq_len", "100", "block=16 must divide"),
]
