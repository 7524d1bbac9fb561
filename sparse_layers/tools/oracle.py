"""The oracle of the op: dense attention and its gradients in float64 numpy, and the error budgets of implementations.

A budget is measured, not tuned: twice the error of the same formulas in the dtype of the call, plus the rounding of
the largest summand. The formulas are written out here: no kernel, plan or block list takes part.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Rows judged together: enough for the largest error among them to be typical, few enough to be of similar size.
ROWS = 32
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks", "dtable")


def same_segment(q_ids: np.ndarray, kv_ids: np.ndarray) -> np.ndarray:
    """Returns the pairs, bool [B, 1, T, S], with equal segment ids >= 0 of queries [B, T] and of keys [B, S].

    Example:
      >>> import numpy as np
      >>> from sparse_layers.tools.oracle import same_segment
      >>> same_segment(np.array([[4, -1]]), np.array([[4, 2, -1]])).tolist()
      [[[[True, False, False], [False, False, False]]]]
    """
    return ((q_ids[:, :, None] == kv_ids[:, None, :]) & (q_ids[:, :, None] >= 0))[:, None]


def in_order(q_ids: np.ndarray, kv_ids: np.ndarray) -> np.ndarray:
    """Returns the pairs, bool [B, 1, T, S], where the order id of the key [B, S] is at most that of the query [B, T].

    Example:
      >>> import numpy as np
      >>> from sparse_layers.tools.oracle import in_order
      >>> in_order(np.array([[1, 1, 2]]), np.array([[1, 1, 2]])).astype(int).tolist()
      [[[[1, 1, 0], [1, 1, 0], [1, 1, 1]]]]
    """
    return (kv_ids[:, None, :] <= q_ids[:, :, None])[:, None]


class DenseAttention:
    """Dense attention of one call with its gradients, as papers write it, and the sizes of what is summed up in them.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H], where K divides N.
      value: [B, S, K, Hv].
      allowed: bool, the pairs that may attend; broadcasts against [B, N, T, S].
      dout: gradient of out [B, T, N, Hv].
      dlse: gradient of lse [B, T, N]; None for 0.
      scale: factor of the logits; None for H ** -0.5.
      soft_cap: as ``logits_soft_cap`` of the op.
      sinks: logits [N] without a key, or None.
      table: a bias [N, L] or [1, L] of logits by distance, added before the soft cap as ``table[h, clip(s - t +
        center, 0, L - 1)]``, or None.
      center: the index of distance 0 in the table.
      table_index: int [T, S], the entry of each pair, in place of that by distance; or None.
      slopes: numbers [N] or None: logits get ``-slopes[h] * |s - t|``, too.
      dtype: float64 for the right answers. Another dtype measures its rounding: float32 computes in it, a half
        precision computes in float32 and rounds after each step.

    Attributes:
      answers: by `NAMES`: out [B, T, N, Hv], lse [B, T, N] and the gradients in the shapes of the arguments. A query
        that sees nothing has out 0 and lse -inf. There is no dsinks without sinks,
        and no dtable without a table.

    Example:
      >>> import numpy as np
      >>> from sparse_layers.tools.oracle import DenseAttention
      >>> x = np.ones((1, 2, 1, 1))
      >>> exact = DenseAttention(x, x, np.array([[[[2.0]], [[4.0]]]]), np.tri(2, dtype=bool), x)
      >>> exact.answers["out"].ravel().tolist(), exact.answers["dv"].ravel().tolist()
      ([2.0, 3.0], [1.5, 0.5])
    """

    def __init__(
        self,
        query: Any,
        key: Any,
        value: Any,
        allowed: np.ndarray,
        dout: Any,
        dlse: Any = None,
        *,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: Any = None,
        table: Any = None,
        center: int = 0,
        table_index: np.ndarray | None = None,
        slopes: Any = None,
        dtype: Any = np.float64,
    ):
        dtype = jnp.dtype(dtype)
        acc_dtype = np.dtype(np.float64 if dtype == np.float64 else np.float32)

        def rounded(x):
            return x if dtype == acc_dtype else x.astype(dtype).astype(acc_dtype)

        query, key, value, dout = (np.asarray(x).astype(acc_dtype) for x in (query, key, value, dout))
        self._groups = query.shape[2] // key.shape[2]
        key, value = (np.repeat(x, self._groups, axis=2) for x in (key, value))  # [B, S, N, ...]
        dlse = np.zeros(query.shape[:3], acc_dtype) if dlse is None else np.asarray(dlse).astype(acc_dtype)
        sink = -np.inf if sinks is None else np.asarray(sinks).astype(acc_dtype)[None, :, None, None]
        self._scale = query.shape[-1] ** -0.5 if scale is None else scale

        logits, slope = rounded(self._scale * rounded(_scores(query, key))), 1.0  # [B, N, T, S]
        self._set_bias(table, center, table_index, slopes, (query.shape[1], key.shape[1]))
        logits = rounded(logits + self._bias.astype(acc_dtype))
        if soft_cap is not None:
            squashed = rounded(np.tanh(logits / soft_cap))
            logits, slope = rounded(soft_cap * squashed), 1 - squashed**2
        logits = np.where(allowed, logits, -np.inf)
        m = np.maximum(logits.max(-1, keepdims=True), sink)
        m = np.where(m == -np.inf, 0, m)
        weights, sink_weight = rounded(np.exp(logits - m)), rounded(np.exp(sink - m))
        total = weights.sum(-1, keepdims=True) + sink_weight
        p, p_sinks = (rounded(x / np.where(total == 0, 1, total)) for x in (weights, sink_weight))
        with np.errstate(divide="ignore"):
            lse = m + np.log(total)

        out = rounded(_weighted(p, value))
        delta = rounded((out * dout).sum(-1)) - dlse  # [B, T, N]
        dlogits = rounded(p * slope * (rounded(_scores(dout, value)) - delta.swapaxes(1, 2)[..., None]))
        self._p_sinks = None if sinks is None else p_sinks[..., 0].swapaxes(1, 2)  # [B, T, N]
        self._allowed, self._m, self._p, self._slope, self._delta = allowed, m, p, slope, delta
        self._arrays = query, key, value, dout, dlse
        gradients = self._gradients(p, dlogits, query, key, dout, -delta)
        answers = {"out": out, "lse": lse[..., 0].swapaxes(1, 2), **gradients}
        self.answers = {name: x if name in ("lse", "dsinks", "dtable") else rounded(x) for name, x in answers.items()}

    def _set_bias(self, table: Any, center: int, table_index: Any, slopes: Any, lengths: tuple[int, int]) -> None:
        """Sets the bias [N or 1, T, S] of logits, and the table's shape and the entry [T, S] of each pair."""
        distances = np.arange(lengths[1]) - np.arange(lengths[0])[:, None]
        self._bias, self._indices = np.zeros((1, 1, 1)), None
        if table is not None:
            by_distance = np.clip(distances + center, 0, table.shape[1] - 1)
            self._indices, self._table_shape = by_distance if table_index is None else table_index, table.shape
            self._bias = self._bias + np.asarray(table).astype(np.float64)[:, self._indices]
        if slopes is not None:
            self._bias = self._bias - np.array(slopes)[:, None, None] * abs(distances)

    def absolute_sums(self) -> dict[str, np.ndarray]:
        """Returns the sums of the absolute values that are summed up in each answer, by `NAMES` in its shape.

        Rounding a logit by a share of its summands changes its weight by as much: that is counted, too. Where a sum is
        0, nothing contributes, and the answer must be exactly 0.
        """
        query, key, value, dout, dlse = (abs(x) for x in self._arrays)
        logits = abs(self._scale) * _scores(query, key) + abs(self._bias)
        p = self._p * (1 + logits)
        out = _weighted(p, value)
        delta = (out * dout).sum(-1) + dlse
        dlogits = p * self._slope * (_scores(dout, value) + delta.swapaxes(1, 2)[..., None])
        lse = (abs(self._m) + np.where(self._allowed, logits, 0).max(-1, keepdims=True))[..., 0].swapaxes(1, 2)
        gradients = self._gradients(p, dlogits, query, key, dout, delta)
        return {"out": out, "lse": lse} | {name: abs(x) for name, x in gradients.items()}  # scales may be negative

    def root_sum_squares(self) -> dict[str, np.ndarray]:
        """Returns the roots of the sums of squares of the summands of out, dq, dk and dv, by name, in their shapes.

        Independent rounding errors add up like this.
        """
        query, key, value, dout, _ = self._arrays
        dlogits = self._p * self._slope * (_scores(abs(dout), abs(value)) + abs(self._delta).swapaxes(1, 2)[..., None])
        dq, dk, dv = self._products(self._p**2, dlogits**2, query**2, key**2, dout**2)
        return {
            "out": np.sqrt(_weighted(self._p**2, value**2)),
            "dq": abs(self._scale) * np.sqrt(dq),
            "dk": abs(self._scale) * np.sqrt(dk),
            "dv": np.sqrt(dv),
        }

    def _gradients(self, p, dlogits, query, key, dout, delta) -> dict[str, np.ndarray]:
        dq, dk, dv = self._products(p, dlogits, query, key, dout)
        dsinks = {} if self._p_sinks is None else {"dsinks": (self._p_sinks * delta).sum((0, 1))}
        dtable = {} if self._indices is None else {"dtable": self._by_distance(dlogits)}
        return {"dq": self._scale * dq, "dk": self._scale * dk, "dv": dv} | dsinks | dtable

    def _by_distance(self, dlogits) -> np.ndarray:
        """Returns the sums of gradients of logits [B, N, T, S] by index of the table, in its shape."""
        assert self._indices is not None
        sums = np.zeros((self._table_shape[1], dlogits.shape[1]), dlogits.dtype)
        np.add.at(sums, self._indices, np.moveaxis(dlogits.sum(0), 0, -1))
        return sums.T if dlogits.shape[1] == self._table_shape[0] else sums.sum(1)[None]

    def _products(self, p, dlogits, query, key, dout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns dlogits k [B, T, N, H], dlogits^T q [B, S, K, H] and p^T dout [B, S, K, Hv]."""

        def to_keys(weights, x):
            products = np.einsum("bnts,btnh->bsnh", weights, x, optimize=True)
            return products.reshape(*products.shape[:2], -1, self._groups, products.shape[-1]).sum(3)

        return _weighted(dlogits, key), to_keys(dlogits, query), to_keys(p, dout)


def budgets(
    right: Mapping[str, np.ndarray], rough: Mapping[str, np.ndarray], sizes: Mapping[str, np.ndarray], dtype: Any
) -> dict[str, float]:
    """Returns the largest error that is rounding: 2 * (error of ``rough`` + eps * largest of ``sizes``), by name.

    Args:
      right: answers in float64.
      rough: answers of dense attention in the dtype of the call; names that it lacks get no budget.
      sizes: `DenseAttention.absolute_sums` or `DenseAttention.root_sum_squares`.
      dtype: that of the call.
    """
    eps, measured = float(jnp.finfo(dtype).eps), {}
    for name in [name for name in rough if name in sizes]:
        measured[name] = 2 * (largest_error(rough[name], right[name]) + eps * float(np.max(sizes[name])))
        if not np.isfinite(measured[name]):
            where = f"{name} of dense attention in {jnp.dtype(dtype).name}"
            raise ArithmeticError(f"{where} must be finite where float64 is, and infinite elsewhere")
    return measured


def largest_error(answer: Any, right: np.ndarray) -> float:
    """Returns the largest absolute difference; inf if shapes differ, a number is NaN, or infinities are elsewhere."""
    answer = np.asarray(answer).astype(np.float64)
    if answer.shape != right.shape:
        return np.inf
    finite = np.isfinite(right)
    error = np.abs(answer[finite] - right[finite]).max(initial=0)
    return float(error) if np.array_equal(answer[~finite], right[~finite]) and not np.isnan(error) else np.inf


def _scores(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    return np.einsum("btnh,bsnh->bnts", query, key, optimize=True)


def _weighted(weights: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.einsum("bnts,bsnh->btnh", weights, value, optimize=True)


# --- without an oracle, where a sequence is too long for one ---------------------------------------------------------


@jax.jit
def neighbour(key: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the numbers changed by their dtype's epsilon, up or down: by one or two of their last places."""
    acc_dtype = jnp.promote_types(x.dtype, jnp.float32)
    signs = jax.random.rademacher(key, x.shape, acc_dtype)
    return (x.astype(acc_dtype) * (1 + float(jnp.finfo(x.dtype).eps) * signs)).astype(x.dtype)


@jax.jit
def largest_by_rows(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the largest difference in every `ROWS` rows of [B, T, N, H]: [B, groups, N]; of a vector: []."""
    acc_dtype = jnp.promote_types(a.dtype, jnp.float32)
    difference = jnp.abs(a.astype(acc_dtype) - b.astype(acc_dtype))
    if difference.ndim == 1:
        return difference.max()
    rows = difference.max(-1)
    rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % ROWS), (0, 0)))
    return rows.reshape(rows.shape[0], -1, ROWS, rows.shape[2]).max(2)
