"""The reference as its readers can use it: names that they can write in signatures, properties uncut."""

import inspect
import sys
from typing import Any

import jax


class _Named:
    """A default as a name: what its repr says is an address, or the name of a class in angle brackets."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _default(value: Any, names: dict[str, Any]) -> Any:
    """A default whose repr can be read; ``names`` are those of the modules that a class is written in."""
    if value is inspect.Parameter.empty or not repr(value).startswith("<"):
        return value
    if isinstance(value, type):
        return _Named(f"{value.__module__.replace('jax.numpy', 'jnp')}.{value.__qualname__}")
    names = names | vars(jax.nn.initializers)
    return _Named(next(name for name, named in names.items() if named is value))


def _signature(app, what, name, obj, options, signature, returns):
    """Arguments of a class as its ``__init__`` says them, since metaclasses, as those of Flax, say little of them."""
    hidden = what == "class" and "__init__" in vars(obj) and "**kwargs" in (signature or "")
    if not hidden and "<" not in (signature or ""):
        return None
    parameters = inspect.signature(obj.__init__ if hidden else obj).parameters.values()
    modules = [kind.__module__ for kind in inspect.getmro(obj)] if inspect.isclass(obj) else [obj.__module__]
    names = {name: value for module in reversed(modules) for name, value in vars(sys.modules[module]).items()}
    shown = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_default(parameter.default, names))
        for parameter in parameters
        if parameter.name not in ("self", "parent")  # Linen sets a module's parent itself
    ]
    return str(inspect.Signature(shown)), None


def _property(app, what, name, obj, options, lines):
    """Lets Napoleon take no text before a colon for the type of a property."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment: it has no colon, and is not shown


def setup(app: Any) -> dict[str, bool]:
    """Sphinx asks for it."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-docstring", _property, priority=400)  # before Napoleon
    return {"parallel_read_safe": True}
