"""The faults that sanitizers have to report can still be planted, and their tests still exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools import gpu_sanitize
from tools.sanitize import SANITIZERS, Plant, with_tests

ROOT = Path(__file__).parents[2]
PLANTS = [plant for sanitizer in SANITIZERS.values() for plant in sanitizer.plants]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.source)
def test_fault_has_its_place_and_its_test(plant: Plant) -> None:
    assert (ROOT / plant.source).read_text().count(plant.old) == 1
    file, _, name = plant.test.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text()


def test_tests_that_are_run_exist() -> None:
    for sanitizer in SANITIZERS.values():
        assert sanitizer.plants
        for test in sanitizer.tests:
            assert (ROOT / test).is_file()


def test_address_sanitizer_runs_all_tests_of_native_code() -> None:
    native = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/unit/test_native_*.py")}
    assert native <= set(SANITIZERS["asan"].tests)


def test_flags_of_pytest_choose_among_the_tests_of_a_sanitizer() -> None:
    sanitizer = SANITIZERS["tsan"]
    assert with_tests(["-k", "threads"], sanitizer) == ["-k", "threads", *sanitizer.tests]
    assert with_tests(["-x", "tests/unit/test_key.py"], sanitizer) == [
        "-x",
        "tests/unit/test_key.py",
    ]


def test_tests_left_out_by_the_gpu_sanitizer_exist_and_are_not_all() -> None:
    tests = [
        re.findall(r"^def (test_\w+)\(", (ROOT / file).read_text(), re.MULTILINE)
        for file in gpu_sanitize.TESTS
    ]
    for name in gpu_sanitize.EXCLUDED:
        assert sum(name in test for file in tests for test in file) == 1, name
    for file in tests:
        assert not all(any(name in test for name in gpu_sanitize.EXCLUDED) for test in file)
