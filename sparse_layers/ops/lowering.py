"""An implementation that was picked for one platform is refused in a program that is lowered for another one.

``implementation=None`` is resolved where the op is traced. `jax.export` and ``lower(lowering_platforms=)`` may lower
the trace for another platform, which is known only then. A primitive that computes nothing checks it when lowered.
"""

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .planning.platforms import implementation_order, platform_family


def guard_platform(x: jax.Array, implementation: str, platform: str) -> jax.Array:
    """Returns x; lowering the program for a platform that would not pick this implementation raises ValueError."""
    return _guard_p.bind(x, implementation=implementation, platform=platform)


_guard_p = Primitive("sparse_attention_platform_guard")
_guard_p.def_impl(lambda x, **_: x)
_guard_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_guard_p, lambda cotangent, x, **_: [cotangent])
batching.defvectorized(_guard_p)


def _check_platforms(context, x, *, implementation, platform):
    # JAX leaves the platforms of a rule open where it lowers for those of the module.
    targets = dict.fromkeys(map(platform_family, context.platforms or context.module_context.platforms))
    for target in targets:
        if target != platform and implementation_order(target) != (implementation,):
            names = ", ".join(map(repr, implementation_order(target)))
            advice = (
                f"name one, or trace under a mesh of {target} devices, also an abstract one "
                "(jax.sharding.use_abstract_mesh), by its abstract_device"
                if len(targets) == 1
                else f"name one for all of {tuple(targets)}, as implementation='xla', or export for each by itself"
            )
            raise ValueError(
                f"implementation=None chose {implementation!r} for {platform}, where the op was traced, but the "
                f"program is lowered for {target}, which would try {names}: {advice}"
            )
    return [x]


mlir.register_lowering(_guard_p, _check_platforms)
