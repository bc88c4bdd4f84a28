"""The mark of tests that need compiled code."""

import pytest

from stowage.native import is_built

needs_native = pytest.mark.skipif(not is_built(), reason="no compiled code: there was no C compiler at installation")
