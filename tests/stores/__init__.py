"""Tests of everything that holds blocks by key."""

import pytest

pytest.register_assert_rewrite("tests.stores.contract", "tests.stores.contract_capacity")
