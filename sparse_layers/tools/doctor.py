"""``python -m sparse_layers doctor``: what is installed, what each implementation says to it, and a self-check.

The oracle computes what is right in float64, and what an implementation may be off: twice the error of the same
formulas rounded to the dtype of the call after each step, plus the rounding of the summands. The contract that every
implementation is held to is in the tests; this is its smallest part, for the machine at hand. Nothing is written and
nothing is asked of the network by this file; JAX and Triton may keep caches.
"""

import dataclasses
import importlib.metadata
import platform
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from ..masks.adapters import as_masks
from ..masks.algebra import Mask
from ..masks.bounded_cache import bounded_cache
from ..masks.presets import preset
from ..masks.primitives import Causal
from ..ops.attention import block_sparse_attention
from ..ops.decoding import fused
from ..ops.decoding.cache import KVCache
from ..ops.implementations import IMPLEMENTATIONS
from ..ops.kernels.call import Call
from ..ops.kernels.gpu import assembler, hardware
from ..ops.kernels.operands import Operands
from ..ops.planning import platforms
from ..ops.planning.params import BwdParams, FwdParams
from ..ops.planning.plan import Plan
from ..ops.planning.planner import make_plan
from ..ops.traced_call import ASSUMED_HEADS, trace_call
from . import oracle

ANSWERS = ("out", "dq", "dk", "dv")

# Of packages in one row, those that are there are shown.
_PACKAGES = {
    **{name: (name,) for name in ("sparse-layers", "numpy", "jax", "jaxlib", "flax", "optax")},
    **{name: (name,) for name in ("triton", "libtpu")},
    "CUDA plugin": ("jax-cuda13-plugin", "jax-cuda12-plugin"),
    "cuDNN": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
}
# Presets whose kernels are named, and for how many tokens.
_TRACED, _LENGTH = ("causal", "sliding_window", "sparse_transformer_strided"), 8192
_BATCH, _HEADS, _KEY_HEADS, _SIZE = 2, 2, 1, 32
# Implementations that a `KVCache` knows.
_DECODE = ("triton", "xla")


# --- what there is ---------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Returns the versions of Python, of the packages that matter here, and of what GPU kernels are assembled with."""
    table = {"Python": f"{platform.python_version()} ({platform.system()} {platform.machine()})"}
    for label, names in _PACKAGES.items():
        installed = []
        for name in names:
            try:
                number = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            installed.append(number if name == label else f"{name} {number}")
        table[label] = ", ".join(installed) or "not installed"
    release, ptxas, gpu = hardware.driver_release(), assembler.find_assembler(), hardware.local_device()
    table["CUDA driver"] = "not found" if release is None else f"CUDA {release}"
    table["assembler"] = "no ptxas found" if ptxas is None else str(ptxas)
    if isinstance(gpu, hardware.Device) and gpu.ptx_version is not None:
        table["PTX"] = f"{gpu.ptx_version / 10}, which both Triton and the assembler know"
    return table


def devices() -> list[str]:
    """Returns a line for each device that JAX sees: its name, kind, compute capability and memory, if known."""
    lines = []
    for device in jax.local_devices():
        fields = [str(device), device.device_kind]
        if (capability := getattr(device, "compute_capability", None)) is not None:
            fields.append(f"compute capability {capability}")
        if limit := (device.memory_stats() or {}).get("bytes_limit"):
            fields.append(f"{limit / 2**30:.1f} GiB of memory for JAX")
        lines.append(", ".join(fields))
    return lines


def reason(implementation: str, check: "Check", *, unnamed: bool = False) -> str | None:
    """Returns why an implementation does not support the call of a check here; None if it does.

    With ``unnamed``, for a call with ``implementation=None``, also why another one may be the better choice.
    """
    backend, plan = IMPLEMENTATIONS[implementation], check.plan(implementation)
    arrays = {"segments": check.segment_ids(), "order_ids": check.order_ids()}
    pairs: Any = {name: None if x is None else (jnp.asarray(x), jnp.asarray(x)) for name, x in arrays.items()}
    blocks = (64, 64)  # of masks known at run time only
    call = Call(plan, blocks, blocks, (plan.fwd_params, plan.bwd_params), _SIZE**-0.5, None)
    try:
        operands = Operands(*check.arrays()[:3], segments=pairs["segments"], order_ids=pairs["order_ids"])
        not_preferred = getattr(backend, "not_preferred", None) if unnamed else None
        return backend.unsupported(call, operands) or (not_preferred(call, operands) if not_preferred else None)
    except Exception as error:
        return f"asked, it raised {_brief(error)}"


def first_that_works(check: "Check") -> str:
    """The implementation that ``implementation=None`` takes here for the call of a check."""
    candidates = platforms.implementation_order(platforms.platform())
    return next(name for name in candidates if reason(name, check, unnamed=True) is None)


def made_for(implementation: str) -> str | None:
    """The other platform whose kernels an implementation has, interpreted only here; None if it has none."""
    homes = [name for name, preferred in platforms.PREFERRED.items() if implementation in preferred]
    return homes[0] if homes and platforms.platform() not in homes else None


def report() -> str:
    """Returns versions, devices, and for each implementation whether it works on this machine, and why not."""
    table = versions()
    lines = ["versions", *(f"  {name:<14}{version}" for name, version in table.items())]
    platform_name = platforms.platform()
    lines += ["", f"devices, of which JAX computes on {platform_name}", *(f"  {line}" for line in devices())]
    if platform_name == "cpu" and table["CUDA plugin"] != "not installed":
        lines.append("  note: a CUDA plugin is installed, but JAX found no GPU that it can use; see JAX's own messages")
    lines += ["", "implementations"]
    defaults = {probe: first_that_works(probe) for probe in PROBES}
    for name in IMPLEMENTATIONS:
        calls: dict[str, list[str]] = {}
        for probe in PROBES:
            text = _verdict(name, reason(name, probe), defaults[probe] == name)
            calls.setdefault(text, []).append(f"{probe.name} {probe.dtype}")
        # Without the calls if all get the same answer.
        for text, names in calls.items():
            lines.append(f"  {name:<14}{'' if len(calls) == 1 else ', '.join(names) + ': '}{text}")
    if platform_name == "gpu":
        lines += ["", f"what runs at {_LENGTH} tokens, bfloat16, {ASSUMED_HEADS} heads of 128, 1 batch entry"]
        traced = {name: str(trace_call(make_plan(name, _LENGTH))) for name in _TRACED}
        lines += [f"  {name}: {text}".replace("\n", "\n  ") for name, text in traced.items()]
    return "\n".join(lines)


def _verdict(name: str, why: str | None, is_default: bool) -> str:
    platform_name = platforms.platform()
    if why is not None:
        return f"unavailable: {why}"
    text = "works"
    if home := made_for(name):
        text += f", interpreted, for tests: its kernels are made for {home}"
    if is_default:
        text += "; implementation=None takes it"
        if name in platforms.FALLBACK and platform_name != "cpu":
            text += f", and it is slow on {platform_name}"
    return text


# --- the self-check --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Check:
    """One call whose values and gradients are compared with what is right."""

    name: str  # what it shows
    mask: Mask  # the pattern
    length: int  # tokens; no multiple of any block size
    dtype: str  # of query, key, value and out
    documents: bool = False  # whether there are segment ids, three documents and padding, and order ids
    block: int | None = None  # block size of queries and keys; None leaves it to the library
    steps: int = 0  # of decoding, which add the last tokens; then out alone is compared, of these

    def __str__(self):
        return f"{self.name}, T = {self.length}, {self.dtype}"

    def plan(self, implementation: str) -> Plan:
        """The plan; with a block size of its own, one priced as for TPUs, where chains pay at shorter lengths."""
        if self.block is None:
            return make_plan(self.mask, self.length, implementation=implementation)
        sizes: dict[str, Any] = {"q_blocksize": self.block, "kv_blocksize": self.block}
        options: dict[str, Any] = {"fwd_params": FwdParams(**sizes), "bwd_params": BwdParams(**sizes)}
        return make_plan(self.mask, self.length, implementation="pallas_tpu", **options)

    def segment_ids(self) -> np.ndarray | None:
        """int32 [B, T], or None."""
        if not self.documents:
            return None
        ends = [self.length * share // 10 for share in (2, 5, 9)]
        ids = np.array([7, 0, 3, -1], np.int32)[np.searchsorted(ends, np.arange(self.length), side="right")]
        return np.broadcast_to(ids, (_BATCH, self.length))

    def order_ids(self) -> np.ndarray | None:
        """int32 [B, T], tokens in blocks that see themselves whole, or None."""
        if not self.documents:
            return None
        return np.broadcast_to(np.arange(self.length, dtype=np.int32) // 24, (_BATCH, self.length))

    def arrays(self) -> list[jax.Array]:
        """Query [B, T, N, H], key and value [B, T, K, H], and the gradient of out [B, T, N, H], in the dtype."""
        rng = np.random.default_rng(0)
        heads = (_HEADS, _KEY_HEADS, _KEY_HEADS, _HEADS)
        return [jnp.asarray(rng.normal(size=(_BATCH, self.length, n, _SIZE)), self.dtype) for n in heads]


def _preset(name: str, **options: int | bool) -> Mask:
    (mask,) = as_masks(preset(name, **options))
    return mask


# What every implementation is asked for in the report.
PROBES = tuple(
    Check(name, mask, 64, dtype)
    for name, mask in (("causal", Causal()), ("strided", _preset("sparse_transformer_strided", stride=16)))
    for dtype in ("bfloat16", "float32")
)


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a check."""

    implementation: str  # which was checked
    check: Check  # on what
    # For each of `ANSWERS`, its largest error as a share of its budget: at most 1 is right. Empty if the call raised.
    shares: dict[str, float]
    seconds: float  # time of compiling and running it
    error: str | None = None  # what was raised, or None

    @property
    def passed(self) -> bool:
        """True if every answer is right."""
        return self.error is None and all(share <= 1 for share in self.shares.values())

    def __str__(self):
        if self.error is None:
            worst = max(self.shares, key=lambda name: self.shares[name])
            text = f"{self.shares[worst]:.2f} of the budget ({worst})"
        else:
            text = f"raised {self.error}"
        verdict = "PASS" if self.passed else "FAIL"
        return f"{self.implementation:<14}{self.check!s:<50}{verdict}  {text}, {self.seconds:.1f} s"


def checks(implementation: str) -> list[Check]:
    """Returns the checks of an implementation here: a tiny call if it is interpreted, else three calls and decoding."""
    if made_for(implementation):
        return [Check("strided", _preset("strided", local_attn_ctx=16), 75, "float32", block=16)]
    # Accelerators get the block sizes that users get, and a length at which they chain.
    length, stride, block = (301, 16, 16) if platforms.platform() == "cpu" else (2001, 64, None)
    if implementation == "cudnn":  # it takes an even number of tokens
        length -= 1
    longformer = _preset("longformer", window=length // 6, global_tokens=5, causal=False)
    strided = _preset("sparse_transformer_strided", stride=stride)
    three = [
        Check("causal", Causal(), length, "bfloat16"),
        Check("strided chain", strided, length, "float32", block=block),
        Check("longformer, documents", longformer, length, "float32", documents=True),
    ]
    return three + ([Check("decoding", strided, length, "bfloat16", steps=3)] if implementation in _DECODE else [])


def self_check(implementations: Sequence[str] | None = None) -> Iterator[Result]:
    """Compares values and gradients of implementations, None for all, with float64, one check after the other.

    Yields a `Result` for each of their `checks` that they support here. Errors that calls raise are results, too.
    """
    for name in IMPLEMENTATIONS if implementations is None else implementations:
        yield from (_result(name, check) for check in checks(name) if reason(name, check) is None)


def _result(implementation: str, check: Check) -> Result:
    start = time.perf_counter()
    try:
        answers = _answers(implementation, check)
    except Exception as error:
        return Result(implementation, check, {}, time.perf_counter() - start, _brief(error))
    seconds = time.perf_counter() - start
    right, budgets = _expected(check)
    shares = {name: oracle.largest_error(answer, right[name]) / budgets[name] for name, answer in answers.items()}
    return Result(implementation, check, shares, seconds)


def _answers(implementation: str, check: Check) -> dict[str, np.ndarray]:
    """Returns the op's results in float64 by the names of `ANSWERS`; of decoding steps, out alone."""
    if check.steps:
        return {"out": np.asarray(_decoded(implementation, check)).astype(np.float64)}
    plan = check.plan(implementation)
    options: dict[str, Any] = {"segment_ids": check.segment_ids(), "order_ids": check.order_ids()}

    @jax.jit
    def run(query, key, value, dout):
        def attend(query, key, value):
            return block_sparse_attention(query, key, value, plan, implementation=implementation, **options)

        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(dout)

    return {name: np.asarray(x).astype(np.float64) for name, x in zip(ANSWERS, run(*check.arrays()), strict=True)}


def _decoded(implementation: str, check: Check) -> jax.Array:
    """Returns out [B, steps, N, H] of the last tokens, computed by decoding steps after the others."""
    sizes: dict[str, Any] = {"batch": _BATCH, "num_heads": _HEADS, "num_kv_heads": _KEY_HEADS, "head_size": _SIZE}
    first = check.length - check.steps

    @jax.jit
    def run(query, key, value):
        cache = KVCache.empty(check.mask, check.length, dtype=check.dtype, implementation=implementation, **sizes)
        arrays = cache.keys, cache.values
        if implementation == "triton" and not fused.can_attend(cache.layout, arrays, query[:, 0], False):
            raise RuntimeError("the kernel does not support a step, which XLA would compute")
        cache, outs = cache.filled(key[:, :first], value[:, :first]), []
        for position in range(first, check.length):
            out, cache = cache.step(
                query[:, position], key[:, position], value[:, position], jnp.full(_BATCH, position)
            )
            outs.append(out)
        return jnp.stack(outs, axis=1)

    # The kernel wants arrays that are one device's own, which JAX with several of them does not say otherwise.
    one_device = jax.make_mesh((1,), ("device",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:1])
    with jax.set_mesh(one_device):
        return run(*check.arrays()[:3])


@bounded_cache()
def _expected(check: Check) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Returns the right answers and the error budgets, by the names of `ANSWERS`."""
    query, key, value, dout = (np.asarray(x) for x in check.arrays())
    allowed = check.mask.dense(check.length)[None, None]
    if (ids := check.segment_ids()) is not None:
        allowed = allowed & oracle.same_segment(ids, ids)
    if (ids := check.order_ids()) is not None:
        allowed = allowed & oracle.in_order(ids, ids)
    # Of the steps of decoding; without any, of all tokens.
    query, dout, allowed = query[:, -check.steps :], dout[:, -check.steps :], allowed[:, :, -check.steps :]
    exact = oracle.DenseAttention(query, key, value, allowed, dout)
    rough = oracle.DenseAttention(query, key, value, allowed, dout, dtype=check.dtype)
    right = {name: exact.answers[name] for name in ANSWERS}
    return right, oracle.budgets(right, rough.answers, exact.root_sum_squares(), check.dtype)


# --- the command -----------------------------------------------------------------------------------------------------


def examine() -> int:
    """Prints the report, then the self-check line by line; returns the exit code, 1 if a result is wrong."""
    start = time.perf_counter()
    try:
        devices()
    except Exception as error:  # JAX_PLATFORMS names what is not there, or a driver does not start; JAX asserts, too
        print("\n".join(f"{name:<14}{version}" for name, version in versions().items()))
        print(f"\nFAILED: JAX finds no device to compute on: {_brief(error)}")
        return 1
    print(report(), flush=True)
    print("\nself-check of out, dq, dk and dv (of decoding, out) against float64; 1.00 of a budget would still pass")
    results = []
    for result in self_check():
        print(f"  {result}", flush=True)
        results.append(result)
    seconds = f"{time.perf_counter() - start:.0f} s"
    if failed := [result for result in results if not result.passed]:
        print(f"\nFAILED in {seconds}: {'; '.join(f'{result.implementation} ({result.check})' for result in failed)}")
        return 1
    names = ", ".join(dict.fromkeys(result.implementation for result in results))
    print(f"\nall {len(results)} checks passed in {seconds}: {names}")
    return 0


def _brief(error: Exception) -> str:
    """Returns the type and the first line of an error."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:200]}"
