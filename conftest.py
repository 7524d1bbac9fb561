"""Tests and doctests fail by a warning, wherever they lie; what plugins say at start and end does not count."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Makes warnings errors in each test: as a setting of the session, it would break whatever plugin stands by."""
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("error"), append=False)
