import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compilation():
    """These tests compile thousands of small programs to compare numbers: XLA's slower passes would gain nothing."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
