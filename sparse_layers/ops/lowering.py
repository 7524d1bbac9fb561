"""A choice that was made for one platform is not frozen into a program for another.

``implementation=None`` is resolved where the op is traced. `jax.export` and ``lower(lowering_platforms=)`` may turn the
trace into a program for another platform, which is known only then: a primitive that does nothing looks at it.
"""

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .planning.platforms import candidates, generic


def chosen(x: jax.Array, implementation: str, platform: str) -> jax.Array:
    """x; in programs for platforms that would not choose this implementation, a ValueError when they are lowered."""
    return _chosen_p.bind(x, implementation=implementation, platform=platform)


_chosen_p = Primitive("sparse_attention_chosen")
_chosen_p.def_impl(lambda x, **_: x)
_chosen_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_chosen_p, lambda cotangent, x, **_: [cotangent])
batching.defvectorized(_chosen_p)


def _lowered(context, x, *, implementation, platform):
    # JAX leaves the platforms of a rule open where it lowers for those of the module.
    targets = dict.fromkeys(map(generic, context.platforms or context.module_context.platforms))
    for target in targets:
        if target != platform and candidates(target) != (implementation,):
            names = ", ".join(map(repr, candidates(target)))
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


mlir.register_lowering(_chosen_p, _lowered)
