"""The error tree that docstrings and documentation promise."""

import inspect
import sys

import pytest

from stowage import errors

TREE = {
    "StowageError": "Exception",
    "ConfigError": "StowageError",
    "BudgetError": "ConfigError",
    "ModelError": "StowageError",
    "CheckpointError": "ModelError",
    "UnsupportedModelError": "ModelError",
    "RequestError": "StowageError",
    "StorageError": "StowageError",
    "DirectoryError": "StorageError",
    "FormatError": "StorageError",
    "TransferError": "StorageError",
}


def test_the_tree_is_the_documented_one() -> None:
    found = {
        name: item.__base__.__name__
        for name, item in inspect.getmembers(errors, inspect.isclass)
        if item.__base__ is not None
    }
    assert found == TREE


@pytest.mark.parametrize("name", TREE)
def test_every_error_is_drawn_and_public(name: str) -> None:
    import stowage

    assert name in (sys.modules["stowage.errors"].__doc__ or "")
    assert getattr(stowage, name) is getattr(errors, name)
    assert str(getattr(errors, name)("what, why, fix")) == "what, why, fix"
