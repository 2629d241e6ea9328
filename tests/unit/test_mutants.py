"""The table of `make mutants` fits the code: a mutation that no longer applies tests nothing."""

from __future__ import annotations

import ast
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.mutants import __main__ as mutants
from tools.mutants.mutation import PACKAGE, Mutation, Needs
from tools.mutants.table import MUTATIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_applies_to_one_place_and_is_still_python(mutation: Mutation) -> None:
    assert mutation.occurrences(ROOT) == 1
    assert mutation.old != mutation.new
    if not mutation.is_native:
        ast.parse(mutation.file(ROOT).read_text().replace(mutation.old, mutation.new))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_tests_of_a_mutation_exist(mutation: Mutation) -> None:
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        source = (ROOT / file).read_text()
        if name and not name.startswith("TestContract::"):
            assert f"def {name}(" in source
        is_beside_vllm = file.startswith(("tests/engine/", "tests/conformance/"))
        assert is_beside_vllm == (mutation.needs is Needs.VLLM), "only these have vLLM"


_PROFILE = """
from hypothesis import settings
settings.register_profile("landing")
"""


class OneTree:
    """As `Trees`, without a copy of the sources."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def one(self) -> Iterator[Path]:
        yield self._folder


def test_unbroken_tests_that_run_out_of_time_are_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same time would make a mutant pass for noticed."""
    (tmp_path / "test_slow.py").write_text("import time\ndef test_it(): time.sleep(60)\n")
    (tmp_path / "conftest.py").write_text(_PROFILE)
    monkeypatch.setattr(mutants, "LIMIT_S", 0.5)
    mutation = Mutation("name", "path", "old", "new", "harm", ("test_slow.py",))
    assert not mutants.unbroken_tests_pass([mutation], OneTree(tmp_path))  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert "test_slow.py: its tests take more than 0.5 s on unbroken code" in said
    assert "do not pass" not in said


def test_names_are_unique_and_every_important_folder_has_a_mutation() -> None:
    assert max(Counter(mutation.name for mutation in MUTATIONS).values()) == 1
    folders = Counter(mutation.path.split("/")[0] for mutation in MUTATIONS)
    important = {"csrc", "core", "cache", "device", "stores", "remote", "server", "connector"}
    assert set(folders) >= important
    assert (ROOT / PACKAGE).is_dir()
