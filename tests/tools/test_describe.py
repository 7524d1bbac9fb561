import pathlib
import re
import sys

import jax
import numpy as np
import pytest
from flax import nnx

import sparse_layers as sl
from sparse_layers import linen
from sparse_layers.ops import traced_call
from sparse_layers.ops.kernels.gpu import hardware
from sparse_layers.ops.planning.context_parallel import plan_exchanges
from tests.tools.cases import MASKS, expected_cells

SMALL = sl.FwdParams(q_blocksize=16, kv_blocksize=16)


def plain(text):
    """A description without the dtype and head size, which differ by what is described."""
    return re.sub("runs here, .*:", "runs here:", text)


@pytest.mark.parametrize("name", MASKS)
def test_describe_counts_pairs_and_blocks(name):
    """One number of blocks: that of the plan's passes."""
    mask, length = MASKS[name], 150
    dense = mask.dense(length)
    lines = sl.describe(mask, length, fwd_params=SMALL).split("\n")
    pairs = next(line for line in lines if line.startswith("allowed pairs"))
    assert pairs.startswith(f"allowed pairs: {dense.sum()} of {length**2} ({dense.mean():.4%})")
    assert ("of the causal pairs" in pairs) == (not np.any(np.triu(dense, 1)))
    (plan,) = [line for line in lines if line.startswith("plan: ")]
    count, share = re.search(r", (\d+) blocks?, ([\d.]+)% of full attention's$", plan).groups()
    passes = [int(re.search(r"; (\d+) of", line)[1]) for line in lines if line.startswith("  pass ")]
    assert int(count) == sum(passes)
    (chain,) = sl.make_plan(mask, length, fwd_params=SMALL).chains
    every = [(-(-length // block_pass.fwd_shape[0])) * (-(-length // block_pass.fwd_shape[1])) for block_pass in chain]
    expected = sum(block_pass.fwd_blocks / blocks for block_pass, blocks in zip(chain, every, strict=True))
    assert float(share) == pytest.approx(100 * expected, abs=0.01)
    if [block_pass.order_text for block_pass in chain] == ["natural order"]:
        assert int(count) == np.count_nonzero(expected_cells(mask, length, length, 16))
    assert not any(
        "blocks" in line for line in lines if not line.startswith(("plan: ", "  pass ", "  nothing", "  try"))
    )
    assert sl.picture(mask, length) in "\n".join(lines)


def test_describe_explains_its_signs():
    for length, signs in (
        (4, "■ allowed, · not"),
        (1000, "a cell of 32 x 32 tokens: ■ all pairs allowed, ▪ some, · none"),
    ):
        lines = sl.describe(sl.Causal(), length).split("\n")
        assert (
            lines.index(f"rows are queries, columns keys; {signs}")
            == 1 + sl.picture(sl.Causal(), length).count("\n") + 1
        )


@pytest.mark.parametrize(
    "subject, setting",
    [
        (sl.Causal(), "assuming bfloat16, 32 heads of 128, 1 batch entry"),
        (
            sl.make_plan([sl.Causal(), sl.Window(1), sl.Window(2)], 64),
            "assuming bfloat16, 33 heads of 128, 1 batch entry",
        ),
        (sl.make_attention_fn("causal", 64), "assuming bfloat16, 32 heads of 128, 1 batch entry"),
        (
            linen.SparseSelfAttention(2, pattern="causal", seq_len=64),
            "in float32, 2 heads, assuming head size 128, 1 batch entry",
        ),
        (
            linen.SparseSelfAttention(2, pattern="causal", seq_len=64, dtype="float16", head_dim=32),
            "in float16, 2 heads of 32, assuming 1 batch entry",
        ),
        (
            linen.SparseTransformerBlock(4, 64, num_kv_heads=1, pattern="causal", seq_len=64),
            "in float32, 4 query heads and 1 key head of 16, assuming 1 batch entry",
        ),
        (
            linen.NativeSparseAttention(4, head_dim=16, dtype="bfloat16", seq_len=64),
            "in bfloat16, 4 heads of 16, assuming 1 batch entry",
        ),
        (
            sl.NativeSparseAttention(4, 64, dtype="float16", seq_len=64, rngs=nnx.Rngs(0)),
            "in float16, 4 heads of 16, assuming 1 batch entry",
        ),
        (
            sl.SparseSelfAttention(1, 64, pattern="causal", seq_len=64, rngs=nnx.Rngs(0)),
            "in float32, 1 head of 64, assuming 1 batch entry",
        ),
    ],
)
def test_describe_says_dtype_heads_and_head_size(subject, setting, monkeypatch):
    asked = []

    def route(plan, dtype, head_size, *, heads, **_):
        num_heads, kv_heads = heads or (traced_call.assumed_heads(plan),) * 2
        asked.append(f"{dtype} {num_heads} {kv_heads} {head_size}")
        return traced_call.TracedCall("xla", {}, (), (), ())

    monkeypatch.setattr(traced_call, "trace_call", route)
    text = sl.describe(subject, 64) if isinstance(subject, sl.Mask) else sl.describe(subject)
    said = re.findall("^runs here, (.*): 'xla'$", text, re.M)
    assert said and set(said) == {setting}
    numbers = re.search(r"(\w*float\w*), (\d+) (?:query heads and (\d+) key )?heads?.*? (?:of|size) (\d+),", setting)
    dtype, heads, kv_heads, size = numbers.groups()
    assert set(asked) == {f"{dtype} {heads} {kv_heads or heads} {size}"}


def runs(text):
    """The lines about what computes a plan."""
    return text[text.index("runs on") :].split("\n")


def test_describe_names_the_kernels_of_a_gpu_that_is_not_here():
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    window, setting = sl.Causal() & sl.Window(511), "assuming bfloat16, 32 heads of 128, 1 batch entry"
    assert runs(sl.describe(window, 8192, device="h100")) == [
        f"runs on h100, {setting}: 'hopper'",
        "  forward: hopper forward_kernel",
        "  backward: hopper backward_kernel",
    ]
    assert runs(sl.describe(window, 8192, device="h100", segment_ids=True))[1:] == [
        "  forward: triton compact_kernel, then hopper forward_kernel",
        "  backward: triton compact_kernel, then hopper backward_kernel",
    ]
    settings = sl.BwdParams(deterministic=True)
    text = sl.describe(window, 8192, device="9.0", bwd_params=settings)
    assert runs(text)[2] == "  backward: triton dq_kernel, then triton dkv_kernel"
    assert runs(text)[0] == f"runs on compute capability 9.0, {setting}: 'hopper'"
    assert runs(text)[3] == (
        "  Triton runs backward, because the Hopper backward kernel adds to dq in any order, which "
        "BwdParams(deterministic=True) rules out"
    )
    assert text == sl.describe(window, 8192, device=(9, 0), bwd_params=settings)
    # A Plan stays what it was made for.
    plan = sl.make_plan(window, 8192, implementation="hopper", bwd_params=settings)
    assert sl.describe(plan, device="9.0") == text
    assert sl.describe(sl.make_plan(window, 8192, implementation="xla", bwd_params=settings), device="9.0") != text
    assert runs(sl.describe(window, 8192, device="a100")) == [
        f"runs on a100, {setting}: 'cudnn'",
        "  not 'hopper': it needs compute capability 9.0, and this GPU has 8.0",
    ]
    layer = sl.SparseSelfAttention(4, 256, pattern=window, seq_len=1024, dtype="bfloat16", rngs=nnx.Rngs(0))
    setting = "in bfloat16, 4 heads of 64, assuming 1 batch entry"
    assert runs(sl.describe(layer, device="h200"))[0] == f"runs on h200, {setting}: 'hopper'"
    # Selections of single queries, of which some are decided at run time; grouped heads have no kernel for all three.
    forward, backward, *notes = runs(sl.describe(sl.MoBA(64, 8), 8192, device="h100"))[1:6]
    assert forward.split(", then ")[::2] == [
        "  forward: triton kv_outer_kernel (if neighbouring queries disagree)",
        "triton forward_kernel (if neighbouring queries agree)",
    ]
    assert notes == [
        "  Triton runs forward if neighbouring queries disagree, because the Hopper kernel that gathers queries "
        "computes gradients only",
        "  Triton runs forward if neighbouring queries agree, because the Hopper forward kernel takes blocks of 128 "
        "queries and 64 or a multiple of 128 keys, got 32 queries and 64 keys",
        "  the launches that score and choose blocks come before these and are not listed",
    ]
    assert backward == "  backward: hopper query_gather_kernel (split lists)"
    short = runs(sl.describe(sl.MoBA(64, 8), 512, device="h100"))
    assert "kv_outer" not in "".join(short), "every query looks at all blocks"
    assert "score and choose" not in "".join(short)
    grouped = {"num_kv_heads": 2, "pattern": "sparse_transformer_strided", "dtype": "bfloat16", "rngs": nnx.Rngs(0)}
    layer = sl.SparseSelfAttention(4, 256, seq_len=4096, **grouped)
    assert "with dk and dv" not in runs(sl.describe(layer, device="h200"))[2]


def test_describe_says_which_launches_of_two_passes_go_to_triton():
    """With few heads, one kernel would do both forward passes, and has a list that is too long."""
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    options = {"pattern": "sparse_transformer_fixed", "seq_len": 4096, "dtype": "bfloat16", "rngs": nnx.Rngs(0)}
    lines = runs(sl.describe(sl.SparseSelfAttention(4, 512, **options), device="h100"))
    assert lines[1].startswith("  forward: triton forward_kernel (two passes, split lists), then")
    note = (
        "  Triton runs forward (natural order and keys: gathered tokens 96 to 127 of every 128), because one block list"
    )
    assert [line for line in lines if "runs forward" in line] == [lines[3]] and lines[3].startswith(note)
    heads = (sl.Causal(), sl.preset("sparse_transformer_strided"))
    lines = runs(sl.describe(heads, 8192, device="h100"))[3:]
    assert [line.partition(", because")[0] for line in lines] == [
        f"  Triton runs {way} (residue-major order, stride 128; heads 1, 3, ...)" for way in ("forward", "backward")
    ]


def test_describe_counts_the_passes_that_a_bias_leaves_to_tpus():
    """Distances are no diagonals where columns are gathered; slopes need none."""
    settings = {"pattern": "sparse_transformer_fixed", "seq_len": 8192, "implementation": "pallas_tpu"}
    texts = [
        sl.describe(linen.SparseSelfAttention(2, relative_bias=bias, **settings), size=4)
        for bias in (sl.AlibiBias(), sl.LearnedBias(63))
    ]
    two, one = (re.search("^plan: .*?(?=expected)", text, re.M | re.S)[0].splitlines() for text in texts)
    assert two[1].startswith("  pass 1: natural order; ") and "  pass 2: keys: gathered tokens" in two[2]
    natural = two[4].replace("not taken", "chosen")
    assert one[1] == "  pass 1: natural order; 36 of 64 blocks of 1024 x 1024"
    assert one[2:] == [natural, two[3].replace("chosen", "not taken")] and "natural order, cost" in natural
    assert "because a bias with a table needs" in texts[1] and "a bias" not in texts[0]
    assert "less work than causal attention" in texts[1] and "try longer" not in texts[1]


def test_describe_says_which_error_a_call_raises():
    """A layer names its implementation, and the GPU is another one."""
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    shared = {"num_heads": 4, "head_dim": 64, "seq_len": 256, "pattern": "causal"}
    layer = linen.SparseSelfAttention(implementation="hopper", dtype="bfloat16", **shared)
    assert runs(sl.describe(layer, device="a100")) == [
        "runs on a100, in bfloat16, 4 heads of 64, assuming 1 batch entry: NotImplementedError, hopper: it needs "
        "compute capability 9.0, and this GPU has 8.0; implementation=None or 'xla' supports this call"
    ]
    layer = linen.SparseSelfAttention(implementation="cudnn", use_sinks=True, dtype="bfloat16", **shared)
    assert "NotImplementedError, cudnn: it does not know sinks;" in sl.describe(layer, device="a100")


def test_describe_says_what_its_launches_are_not():
    pytest.importorskip("triton", reason="needs triton: pip install triton")
    lines = runs(sl.describe("causal", 1024, devices=8, device="h100"))
    assert lines[0].startswith("runs on h100 if one device has the whole sequence, assuming ")
    assert "the whole sequence" not in sl.describe("causal", 1024, device="h100")
    again = "  the forward pass runs once more before the backward pass, which recomputes it"
    fn = sl.make_attention_fn("causal", 1024, recompute=True)
    block = {"pattern": "causal", "seq_len": 1024, "rngs": nnx.Rngs(0)}
    remat, plain = (sl.SparseTransformerBlock(2, 128, remat=remat, **block) for remat in (True, False))
    assert [again in runs(sl.describe(x, device="h100")) for x in (fn, remat, plain)] == [True, True, False]
    index = linen.SparseSelfAttention(4, num_kv_heads=2, head_dim=16, pattern=sl.MSA(16, 4), seq_len=512)
    assert "  the launches of the index loss, in training, are not listed either" in runs(
        sl.describe(index, device="h100")
    )


def test_describe_logs_nothing(caplog):
    with caplog.at_level("DEBUG", "sparse_layers"):
        sl.describe(sl.Causal(), 64)
        assert not caplog.records
        q = np.ones((1, 64, 1, 8), np.float32)
        sl.block_sparse_attention(q, q, q, sl.Causal())
    assert "block_sparse_attention runs 'xla'" in [record.getMessage() for record in caplog.records]


def test_describe_says_what_to_install(monkeypatch):
    """Before it does any work: the subject is not looked at."""
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModuleNotFoundError, match=r"^device: triton, .* its extra 'gpu', on Linux$"):
        sl.describe(None, device="h100")
    with pytest.raises(ModuleNotFoundError, match=r"^device: "):
        traced_call.trace_call(sl.make_plan(sl.Causal(), 64), device=hardware.DEVICES["h100"])


@pytest.mark.parametrize(("name", "value"), [("device", "h1000"), ("device", 90), ("segment_ids", 1)])
def test_describe_refuses_what_it_does_not_know(name, value):
    with pytest.raises((ValueError, TypeError), match=f"^(describe: )?{name} must be"):
        sl.describe(sl.Causal(), 64, **{name: value})


@pytest.mark.parametrize("length", [100, 300])
def test_describe_says_what_a_scorer_chooses(length):
    """What it leaves is counted once more, query by query."""
    scorer = sl.MoBA(block=16, count=8)
    whole = {t: range(t + 1) for t in range(length)}
    left = sum(len([k for k in keys if k // 16 == t // 16 or k // 16 < 7]) for t, keys in whole.items())
    layers = [
        sl.SparseSelfAttention(2, 8, pattern="moba:block=16,count=8", seq_len=length, rngs=nnx.Rngs(0)),
        linen.SparseSelfAttention(2, pattern="causal", selection=scorer, seq_len=length),
        sl.make_attention_fn(scorer, length),
    ]
    texts = {plain(sl.describe(layer, size=4)) for layer in layers} | {plain(sl.describe(scorer, length, size=4))}
    assert len(texts) == 1
    text = texts.pop()
    assert f"chosen at run time: {scorer!r}" in text and "expected saving, if nothing is chosen: 1.0 times" in text
    if length == 100:
        assert "100 tokens: every query looks at all blocks" in text and scorer.pairs(100) == 5050
        return
    every, scored = length * (length + 1) // 2, round(sum((t + 1) // 16 for t in range(length)) / 2)
    assert f"chosen pairs: {left} of {every} causal ones" in text
    assert f"scores: the work of {scored} pairs (a product with each window of 16 keys for each query head)" in text
    assert text.endswith(
        f"together: the work of {left + scored} pairs, {(left + scored) / every:.2%} of all causal ones"
    )
    assert "each query looks at 8 of up to 19 blocks of 16" in text
    patterns = "causal", scorer
    model = sl.SparseTransformer(8, 2, 8, 2, patterns=patterns, seq_len=length, rngs=nnx.Rngs(0))
    first, second = sl.describe(model, size=4).split("layers 1 of 2:")
    assert "chosen" in second and "chosen pairs" not in first
    nsa = sl.NSA(block=16, count=4, pool_size=8, pool_stride=4)
    model = sl.SparseTransformer(8, 2, 8, 2, patterns=(nsa, "causal"), seq_len=length, rngs=nnx.Rngs(0))
    parts = [part.split("\n") for part in sl.describe(model, size=4).split("layers ")[1:]]
    assert [part[0] for part in parts] == [f"0 of 2, {x}:" for x in ("compressed", "selected", "sliding")] + ["1 of 2:"]
    assert [any(f"{nsa!r}" in line for line in part) for part in parts] == [False, True, False, False]


@pytest.mark.parametrize(
    "scorer, products, features, what",
    [
        # an index query of each key head, with 4 features and not 16
        (
            sl.MSA(16, 3, index_size=4),
            1 + np.arange(200),
            4 / 4,
            "of 4 features with each key for each 4 query heads of 16",
        ),
        (sl.MSA(16, 3), 1 + np.arange(200), 16 / 4, "of 16 features with each key for each 4 query heads of 16"),
        (
            sl.InfLLM(16, 4, local=2, dense_below=0, pool_size=8, pool_stride=4),
            [sum(start + 8 <= t + 1 for start in range(0, 200, 4)) for t in range(200)],
            16,
            "with each window of 8 keys for each query head",
        ),
    ],
)
def test_describe_tells_scores_and_attention_by_one_measure(scorer, products, features, what):
    """A pair of attention is two products of 16 features."""
    layer = linen.SparseSelfAttention(8, num_kv_heads=2, head_dim=16, pattern=scorer, seq_len=200)
    pairs = round(np.sum(products) * features / (2 * 16))
    assert f"scores: the work of {pairs} pairs (a product {what})\n" in sl.describe(layer, size=4)


def test_describe_reports_the_plan():
    mask = sl.preset("sparse_transformer_strided")
    plan = sl.make_plan(mask, 4096)
    text = sl.describe(mask, 4096)
    assert "plan: 2 passes, 95 blocks, 9.28% of full attention's" in text and len(plan.chains[0]) == 2
    assert f"{plan.density(0):.2%}" == "9.28%" and "9.3% of what dense attention computes" in repr(plan)
    for block_pass in plan.chains[0]:
        assert f"{block_pass.q_order}; {block_pass.fwd_blocks} of 1024 blocks of 128 x 128" in text
    (chosen, cost), *others = plan.candidates[0]
    assert f"chosen: {chosen}, cost {cost:.3g} pairs" in text
    assert all(f"not taken: {name}" in text for name, _ in others)
    causal = sl.make_plan(sl.Causal(), 4096).candidates[0][0][1]
    assert f"expected saving: {causal / cost:.1f} times less work than causal attention" in text
    assert "1.0 times less work than causal attention" in sl.describe(sl.Causal(), 500)
    assert "1.0 times less work than full attention" in sl.describe(sl.Full(), 500)
    other = sl.describe(mask, 4096, fwd_params=sl.FwdParams(q_blocksize=64, kv_blocksize=64))
    assert "blocks of 64 x 64" in other and "128 x 128" not in other.partition("plan: ")[2]


def test_describe_estimates_what_it_cannot_count():
    mask, length = sl.Causal() & sl.Strided(100), 24000
    line = next(x for x in sl.describe(mask, length).split("\n") if x.startswith("allowed pairs"))
    assert line.endswith(" pairs)") and " (estimated from " in line and "of the causal pairs" in line
    true = sum(q // 100 + 1 for q in range(length))
    assert abs(int(line.split()[2]) / true - 1) < 0.03


def test_describe_of_other_keys_than_queries():
    blocks = sl.FwdParams(q_blocksize=64, kv_blocksize=64)
    text = sl.describe(sl.Causal(), 100, 300, fwd_params=blocks)
    assert "allowed pairs: 5050 of 30000 (16.8333%), 100.0000% of the causal pairs" in text
    assert "plan: 1 pass, 3 blocks, 30.00% of full attention's" in text and "1.0 times less work than causal" in text
    assert sl.picture(sl.Causal(), 100, 300) in text


def test_describe_of_layers():
    sparse = sl.make_attention_fn(("local:local_attn_ctx=8", sl.Causal()), 64, fwd_params=SMALL)
    text = sl.describe((sl.preset("local", local_attn_ctx=8), sl.Causal()), 64, fwd_params=SMALL)
    assert "blocks of 16 x 16" in text
    ids = np.zeros((1, 64), int)
    for same in (sparse, sparse.plan(64), sl.make_attention_fn(sparse.masks, 64, fwd_params=SMALL, segment_ids=ids)):
        assert sl.describe(same) == text
    own = sl.describe(sl.Causal(), 64)
    layer = linen.SparseSelfAttention(2, pattern="causal", seq_len=64)
    block = linen.SparseTransformerBlock(2, 8, pattern="causal", seq_len=64)
    assert plain(sl.describe(layer)) == plain(sl.describe(block)) == plain(own)
    assert plain(sl.describe(layer, size=4)) == plain(sl.describe(sl.Causal(), 64, size=4))


def test_describe_reckons_with_the_grouped_heads_of_a_layer():
    """Of a short sequence, keys of one head are cheap to send, so all are; those of eight go where needed."""
    told = {}
    for kv_heads in (8, 1):
        layer = sl.SparseSelfAttention(8, 64, num_kv_heads=kv_heads, pattern="strided", seq_len=512, rngs=nnx.Rngs(0))
        _, told[kv_heads] = sl.describe(layer, devices=4, size=4).split("128 tokens each:")
        assert isinstance(layer.plan, sl.Plan)
        routes = [str(part.exchange) for part in plan_exchanges(layer.plan.masks, 512, 4, "xla", 8 // kv_heads)]
        lines = re.findall(r"^  (\w.*)$", told[kv_heads], re.M)
        assert lines == routes + ["together"] * (len(routes) > 1)
    assert "all keys" in told[1] and "by residue" in told[8]


@pytest.mark.parametrize(
    "pattern, forward, backward",
    [
        (sl.Full(), "448.0 MiB, the bound", "448.0 MiB, the bound"),
        ("sliding_window:window=1025", "4.0 MiB, the bound", "4.0 MiB, the bound"),
        ("sparse_transformer_fixed:stride=128,summary=8", "286.0 MiB (bound: 28.0 MiB)", "288.0 MiB (bound: 28.0 MiB)"),
        # q and out are four times as wide as k and v together; 1.75 MiB are of lse, and of delta
        (sl.Causal() & sl.Strided(128), "281.8 MiB, the bound", "283.5 MiB, the bound"),
    ],
)
def test_describe_says_how_many_bytes_devices_receive(pattern, forward, backward):
    """131072 tokens over 8 devices, with 8 key heads and 32 others of 128, in bfloat16: 4 KiB of k and v a token."""
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    layer = linen.SparseSelfAttention(**heads, pattern=pattern, seq_len=131072)
    lines = sl.describe(layer, devices=8, size=4).partition("a sequence over 8 devices, 16384 tokens each:")[2]
    for way, said in (("forward", forward), ("backward", backward)):
        assert f"    {way}: receives {said}; the busiest device computes " in lines


def test_describe_says_how_devices_share_pairs_and_rows():
    """Blocks 1 + 2 and 3 + 4 of 16 x 16 forward, 1 and 2 of 32 x 32 backward; the first tokens in relays, and back."""
    blocks = {"fwd_params": SMALL, "bwd_params": sl.BwdParams(q_blocksize=32, kv_blocksize=32)}
    assert sl.describe(sl.Causal(), 64, devices=2, **blocks).endswith(
        "a sequence over 2 devices, 32 tokens each:\n"
        "  keys of neighbors, 32 before\n"
        "    forward: receives 32 rows of k and v, the bound; the busiest device computes 1.40 times the mean\n"
        "    backward: receives 32 rows of dk and dv, the bound; the busiest device computes 1.33 times the mean"
    )
    text = sl.describe("streaming:window=16,sinks=4", 2048, devices=8, size=4)
    assert (
        "receives 4 rows of k and v, the bound" in text and "12 rows of dk and dv (bound: 4 rows of dk and dv)" in text
    )
    assert "together\n    forward: receives 19 rows of k and v;" in text
    text = sl.describe("strided:local_attn_ctx=16", 2048, devices=8, size=4)
    assert "backward: receives 224 rows of dk and dv, 224 of dout, 224 of dq, the bound" in text
    assert "48 devices, 2 tokens each, none on the last 16:" in sl.describe(sl.Causal(), 64, devices=48, size=4)


def test_describe_says_so_where_nothing_moves():
    layer = linen.NativeSparseAttention(num_heads=4, num_kv_heads=2, seq_len=512)
    text = sl.describe(layer, devices=4, size=4)
    assert "queries over 4 devices, 128 each; each device has all 31 keys" in text
    assert text.count("a sequence over 4 devices, 128 tokens each:") == 2
    assert sl.describe(sl.Causal(), 64, 48, devices=4).endswith(
        "queries over 4 devices, 16 each; each device has all 48 keys"
    )
    nothing = sl.Causal() & sl.Columns(500, 400)
    assert sl.describe(nothing, 256, devices=4, size=4).endswith("\n  nothing moves: no query sees a key")
    # Rounded, what comes would be the bound, and is 1146880 bytes, and not 1114112.
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    fixed = linen.SparseSelfAttention(**heads, pattern="sparse_transformer_fixed:stride=128,summary=8", seq_len=5000)
    assert "receives 1.1 MiB (bound: 1.1 MiB)" in sl.describe(fixed, devices=8, size=4)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the page tells what is planned on a CPU")
def test_devices_in_the_documentation():
    page = (pathlib.Path(__file__).parents[2] / "docs/devices.md").read_text(encoding="utf-8")
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    layer = linen.SparseSelfAttention(**heads, pattern="sparse_transformer_fixed", seq_len=131072)
    said = re.search(r"```text\n(a sequence over.*?)\n```", page, re.S)
    assert said is not None and sl.describe(layer, devices=8, size=4).endswith(f"\n\n{said[1]}")


def test_describe_of_models():
    patterns = (sl.Window(3), sl.Causal() & sl.Strided(4))
    setting, assumed_gpu = "in float32, 2 heads of 2, assuming 1", "assuming bfloat16, 32 heads of 128, 1"
    texts = [sl.describe(pattern, 16).replace(assumed_gpu, setting) for pattern in patterns]

    def model(*layers, **options):
        return nnx.eval_shape(lambda: sl.SparseTransformer(8, 2, 4, *layers, seq_len=16, rngs=nnx.Rngs(0), **options))

    turns = model(3, patterns=patterns)
    assert sl.describe(turns) == f"layers 0, 2 of 3:\n{texts[0]}\n\nlayers 1 of 3:\n{texts[1]}"
    assert sl.describe(turns.blocks[1]) == sl.describe(turns.blocks[1].attention) == texts[1]
    assert sl.describe(model(2, patterns=patterns[0], scan_layers=True)) == f"all 2 layers:\n{texts[0]}"


def test_describe_by_head_and_of_nothing():
    text = sl.describe((sl.Causal(), sl.Empty()), 64)
    assert text.startswith("heads 0, 2, ...:\nCausal()\n") and "\n\nheads 1, 3, ...:\nEmpty()\n" in text
    assert "plan: 0 passes" in text and "expected saving: nothing to compute (cost 0 against " in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(q_len=0), "q_len must be an integer >= 1, got 0"),
        (dict(q_len=4, size=0), "size must be an integer >= 1, got 0"),
        (dict(q_len=64, devices=1000), "devices must be at most 64, the tokens that they share, got 1000"),
    ],
)
def test_describe_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        sl.describe(sl.Causal(), **arguments)


def test_describe_cuts_long_formulas():
    mask = sl.Causal()
    for n in range(40):
        mask = mask & ~sl.Columns(97, n, n + 1)
    for text in (sl.describe(mask, 64), repr(sl.make_plan(mask, 64))):
        assert repr(mask)[:197] + "..." in text and repr(mask)[:198] not in text
    array = sl.Array(np.tri(64, dtype=bool)) & sl.Window(7)
    assert sl.describe(array, 64).startswith("Array(array=bool[64, 64]) & Window(left=7, right=0)\n")
