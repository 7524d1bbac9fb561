"""Attention of users' own in plain JAX, and computations that look like it, of weights and inputs [B, T, D]."""

import jax
import jax.numpy as jnp
import numpy as np

B, T, D, HEADS, EXPERTS, BLOCK = 2, 512, 32, 4, 256, 128
SHAPES = {
    "q": (D, D),
    "k": (D, D),
    "v": (D, D),
    "router": (D, EXPERTS),
    "expert": (EXPERTS, D, D),
    "embedding": (300, D),
    "positions": (4 * T, D),  # for longer inputs than those of the tests
    "latents": (200, D),
}
WEIGHTS = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
ARRAYS = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
X = jax.ShapeDtypeStruct((B, T, D), "float32")
TOKENS = jax.ShapeDtypeStruct((B, T), "int32")


def split_heads(x):
    return x.reshape(*x.shape[:-1], HEADS, -1)


def project(w, x):
    return (x @ w[name] for name in ("q", "k", "v"))


# --- attention -------------------------------------------------------------------------------------------------------


def dense(w, x, bias=0.0):
    q, k, v = map(split_heads, project(w, x))
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) + bias)
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)


def by_hand(w, x):
    """Exponentials over a sum that has a sink; keys come first."""
    q, k, v = project(w, x)
    scores = jnp.einsum("bsd,btd->bst", k, q)
    weights = jnp.exp(scores - scores.max(1, keepdims=True))
    return jnp.einsum("bst,bsd->btd", weights / (1 + weights.sum(1, keepdims=True)), v)


def with_sinks(w, x):
    """Grouped queries, a sink in the softmax, 2 heads of keys."""
    q, k, v = (y.reshape(B, T, 2, -1) for y in project(w, x))
    scores = jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, 2, 2, -1), k[..., : D // 4])
    scores = jnp.concatenate([scores, jnp.zeros((*scores.shape[:-1], 1))], axis=-1)
    return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores)[..., :-1], v)


def talking_heads(w, x):
    q, k, v = map(split_heads, project(w, x))
    scores = jnp.einsum("bthd,bshd,hg->bgts", q, k, w["q"][:HEADS, :HEADS])
    return jnp.einsum("bhts,hg,bsgd->btgd", jax.nn.softmax(scores), w["k"][:HEADS, :HEADS], v)


def query_blocks(w, x):
    """Each block of queries meets all keys."""
    q, k, v = project(w, x)
    blocks = q.reshape(B, T // BLOCK, BLOCK, D).swapaxes(0, 1)
    return jax.lax.map(lambda block: jax.nn.softmax(jnp.einsum("btd,bsd->bts", block, k)) @ v, blocks)


def flattened(w, x):
    """Projections of all tokens of the batch at once."""
    q, k, v = (y.reshape(B, T, D) for y in project(w, x.reshape(-1, D)))
    return jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v


def after_experts(w, x):
    return flattened(w, x + scattered_experts(w, x))


def with_positions(w, x):
    return dense(w, x + w["positions"][:T])


def grouped(w, x):
    """Two key heads, that are repeated for four query heads."""
    q, k, v = project(w, x)
    k, v = (jnp.repeat(y[..., : D // 2].reshape(B, T, 2, -1), 2, axis=2) for y in (k, v))
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", split_heads(q), k))
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)


ATTENTION = (
    dense,
    by_hand,
    with_sinks,
    talking_heads,
    query_blocks,
    flattened,
    after_experts,
    with_positions,
    grouped,
)


# --- attention whose queries are weights ------------------------------------------------------------------------------


def perceiver(w, x):
    """Latents read all tokens."""
    q = split_heads(w["latents"] @ w["q"])
    k, v = (split_heads(x @ w[name]) for name in "kv")
    return jnp.einsum("blhs,bshd->blhd", jax.nn.softmax(jnp.einsum("lhd,bshd->blhs", q, k)), v)


def object_queries(w, x):
    """Decoded objects begin at 0, and have positions, for each entry of the batch."""
    objects = jnp.zeros((B, 200, D))
    return jax.nn.softmax((objects + w["latents"]) @ w["q"] @ (x @ w["k"]).swapaxes(1, 2)) @ (x @ w["v"])


def with_terms_of_positions(w, x):
    """Scores are the sum of three products, two with positions."""
    q, k, v = project(w, x)
    q_positions, k_positions = (w["positions"][:T] @ w[name] for name in "qk")
    scores = jnp.einsum("btd,sd->bts", q, k_positions) + jnp.einsum("td,bsd->bts", q_positions, k)
    return jax.nn.softmax(q @ k.swapaxes(1, 2) + scores) @ v


def latents_after_tokens(w, x):
    """Latents that have read tokens read each other."""
    q, k, v = project(w, w["latents"] + x.mean(1, keepdims=True))
    return jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v


WEIGHTS_AS_QUERIES = perceiver, object_queries, latents_after_tokens, with_terms_of_positions


# --- no dense attention ----------------------------------------------------------------------------------------------


def local_blocks(w, x, window_bias=0.0):
    """A block of queries meets its own keys and those before."""

    def pair(y):
        blocks = y.reshape(B, T // BLOCK, BLOCK, D)
        previous = jnp.pad(blocks, [(0, 0), (1, 0), (0, 0), (0, 0)])[:, :-1]
        return jnp.concatenate([previous, blocks], axis=2)

    q, k, v = project(w, x)
    scores = jnp.einsum("bctd,bcsd->bcts", q.reshape(B, T // BLOCK, BLOCK, D), pair(k))
    return jnp.einsum("bcts,bcsd->bctd", jax.nn.softmax(scores + window_bias), pair(v)).reshape(x.shape)


def local_slices(w, x):
    q, k, v = project(w, x)

    def attend(block):
        rows = (jax.lax.dynamic_slice_in_dim(y, block * BLOCK, BLOCK, axis=1) for y in (q, k, v))
        query, key, value = rows
        return jax.nn.softmax(query @ key.swapaxes(1, 2)) @ value

    return jax.lax.map(attend, jnp.arange(T // BLOCK))


def gathered_blocks(w, x):
    q, k, v = (y.reshape(B, -1, BLOCK // 2, D) for y in project(w, x))
    neighbors = np.stack([np.arange(8), np.arange(8) * 3 % 8], axis=1)
    k, v = (y[:, neighbors].reshape(B, 8, BLOCK, D) for y in (k, v))
    return jax.nn.softmax(q @ k.swapaxes(2, 3)) @ v


def windows_of_images(w, x):
    """Windows of 16 x 16 pixels in images of 16 x 32, as of Swin."""
    return dense(w, x.reshape(B, 16, 2, 16, D).swapaxes(1, 2).reshape(-1, 256, D))


def experts(w, x):
    """A router's weights dispatch tokens to experts and combine their results."""
    weights = jax.nn.softmax(x @ w["router"])
    outputs = jnp.einsum("bte,btd,edf->ebtf", weights, x, w["expert"])
    return jnp.einsum("bte,ebtf->btf", weights, outputs)


def scattered_experts(w, x):
    """Each token goes to one expert's buffer, all of the batch together."""
    tokens = x.reshape(-1, D)
    gates, ids = jax.lax.top_k(jax.nn.softmax(tokens @ w["router"]), 1)
    buffers = jnp.zeros((EXPERTS, 64, D)).at[ids[:, 0], jnp.arange(B * T) % 64].set(tokens)
    outputs = jnp.einsum("ecd,edf->ecf", buffers, w["expert"])
    return (outputs[ids[:, 0], jnp.arange(B * T) % 64] * gates).reshape(x.shape)


def classifier(w, x):
    return jax.nn.log_softmax(x @ w["embedding"].T)[..., :D]


def expected_embedding(w, x):
    return jax.nn.softmax(jax.nn.gelu(x @ w["q"]) @ w["embedding"].T) @ w["embedding"]


def contrastive(w, x):
    left, right = x[:, 0] @ w["q"], x.reshape(-1, D) @ w["k"]
    return jax.nn.log_softmax(right @ right.T)[: len(left), :D] + left


def tied_embedding(w, x):
    return jax.nn.softmax(x @ w["embedding"].T) @ w["embedding"]


def projected_codebook(w, x):
    """Soft vector quantization: codes are the keys, and the values."""
    codes = w["embedding"] @ w["k"]
    return jax.nn.softmax((x @ w["q"]) @ codes.T) @ codes


def codebook_of_heads(w, x):
    codes, values = (split_heads(w["embedding"] @ w[name]) for name in "kv")
    weights = jax.nn.softmax(jnp.einsum("bthd,chd->bthc", split_heads(x @ w["q"]), codes))
    return jnp.einsum("bthc,chd->bthd", weights, values).reshape(x.shape)


def memory(w, x):
    """Keys and values are weights."""
    return jax.nn.softmax(jax.nn.silu(x @ w["q"]) @ w["embedding"].T) @ (w["embedding"] @ w["v"])


def combined_experts(w, x):
    """All experts compute all tokens, and the softmax over experts weighs them."""
    outputs = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, w["expert"]))
    return jnp.einsum("bte,btef->btf", jax.nn.softmax(x @ w["router"]), outputs)


def soft_experts(w, x):
    """Slots of experts are mixtures of tokens, and tokens are mixtures of slots (Soft MoE)."""
    logits = x @ w["router"]
    slots = jnp.einsum("bte,btd->bed", jax.nn.softmax(logits, axis=1), x)
    return jnp.einsum("bte,bed->btd", jax.nn.softmax(logits), jnp.einsum("bed,edf->bef", slots, w["expert"]))


def dispatched_experts(w, x):
    """A router of two layers; the products with its weights sum over tokens."""
    gates = jax.nn.softmax(jax.nn.relu(x @ w["q"]) @ (w["k"] @ w["router"]))
    outputs = jnp.einsum("ebd,edf->ebf", jnp.einsum("bte,btd->ebd", gates, x), w["expert"])
    return jnp.einsum("bte,ebd->btd", gates, outputs)


def slots(w, x):
    """Tokens are divided between slots, the other axis than that of attention."""
    logits = jnp.einsum("ld,bsd->bls", w["latents"] @ w["q"], x @ w["k"])
    shares = jax.nn.softmax(logits, axis=1)
    return (shares / shares.sum(2, keepdims=True)) @ (x @ w["v"])


def efficient_attention(w, x):
    """Features of keys have a softmax over tokens, and no query meets a key."""
    q, k, v = project(w, x)
    return jax.nn.softmax(q) @ (jax.nn.softmax(k, axis=1).swapaxes(1, 2) @ v)


def pooling_of_heads(w, x):
    weights = jax.nn.softmax(x @ w["q"][:, :HEADS], axis=1)
    return jnp.einsum("bth,bthd->bhd", weights, split_heads(x @ w["v"]))


def expected_position(w, x):
    """Matches of two images: values are coordinates."""
    q, k, _ = project(w, x)
    return jax.nn.softmax(q @ k.swapaxes(1, 2)) @ np.indices((16, T // 16)).reshape(2, -1).T


def linear_attention(w, x):
    q, k, v = project(w, x)
    return jax.nn.softmax(q) @ (jnp.exp(k).swapaxes(1, 2) @ v)


def pooling(w, x):
    return jnp.einsum("bt,btd->bd", jax.nn.softmax(x @ w["q"][:, 0]), x)


def mlp(w, x):
    return jnp.exp(x @ w["q"]) @ w["k"]


NO_ATTENTION = (
    local_blocks,
    local_slices,
    gathered_blocks,
    windows_of_images,
    experts,
    scattered_experts,
    classifier,
    expected_embedding,
    contrastive,
    tied_embedding,
    projected_codebook,
    codebook_of_heads,
    memory,
    combined_experts,
    soft_experts,
    dispatched_experts,
    slots,
    linear_attention,
    efficient_attention,
    pooling,
    pooling_of_heads,
    expected_position,
    mlp,
)
