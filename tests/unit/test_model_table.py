"""The table of models: each test it names exists, each sentence it quotes is one the code says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.model_table import (
    NAMED,
    ROOT,
    ROWS,
    Row,
    State,
    feature_tests_table,
    models_table,
    named_table,
    named_tests_table,
    sentence,
)

TESTS = sorted(
    {test for row in ROWS for test in row.tests} | {model.test for model in NAMED if model.test}
)


def exists(test: str) -> bool:
    """Whether `path::name` is a test function at the top of a file, without importing it."""
    path, _, name = test.partition("::")
    name, _, case = name.partition("[")
    file = ROOT / path
    if not file.is_file() or not name.startswith("test_"):
        return False
    text = file.read_text()
    functions = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    return name in functions and (not case or f'"{case.removesuffix("]")}"' in text)


@pytest.mark.parametrize("test", TESTS)
def test_every_test_exists(test: str) -> None:
    assert exists(test)


@pytest.mark.parametrize(
    "test",
    [
        "tests/engine/test_no_such_file.py::test_mla",
        "tests/unit/test_model_table.py::test_no_such_test",
        "tests/unit/test_model_table.py::exists",
        "tests/unit/test_model_table.py::test_every_test_exists[no such case]",
        "tests/unit/test_model_table.py",
    ],
)
def test_test_that_is_not_there_is_noticed(test: str) -> None:
    assert not exists(test)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.feature)
def test_every_row_is_shown_by_a_test(row: Row) -> None:
    assert row.tests
    assert bool(row.says) == (row.state is State.LEFT_ALONE), "the log says why, or has no need to"


def test_sentences_come_from_the_source() -> None:
    assert sentence("the model has no KV") == "the model has no KV cache"
    assert sentence("does not let") == "vLLM does not let KV-cache group … be transferred"
    with pytest.raises(ValueError, match="0 sentences"):
        sentence("the model is too small")
    with pytest.raises(ValueError, match="sentences in"):
        sentence("KV-cache group")


def test_tables_have_a_line_for_each_row() -> None:
    assert len({row.feature for row in ROWS}) == len(ROWS)
    for table, bars in ((models_table(), 2), (feature_tests_table(), 1)):
        lines = table.splitlines()
        assert len(lines) == 2 + len(ROWS)
        assert all(line.count(" | ") == bars for line in lines)


def test_models_by_name_have_a_line_each_and_say_what_shows_it() -> None:
    assert len({model.name for model in NAMED}) == len(NAMED)
    for table, bars in ((named_table(), 3), (named_tests_table(), 1)):
        lines = table.splitlines()
        assert len(lines) == 2 + len(NAMED)
        assert all(line.count(" | ") == bars for line in lines)
    assert all(bool(model.test) == bool(model.tiny) for model in NAMED)


def test_required_models_are_cached() -> None:
    """Nobody makes a row of these say something else by accident."""
    cached = " ".join(row.feature for row in ROWS if row.state is State.CACHED)
    for feature in ("GQA", "latent attention", "sliding windows (Gemma-3", "fp8", "LoRA", "n-gram"):
        assert feature in cached


def test_page_for_users_names_no_test() -> None:
    assert "tests/" not in (ROOT / "docs" / "models.md").read_text()


def test_pages_are_linked() -> None:
    architecture = Path(ROOT / "docs" / "architecture.md").read_text()
    assert "(models.md)" in architecture
    assert "(model-tests.md)" in architecture
