"""Targets that nothing here can run: what they need is there, and nothing is left out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from tools.gpu_tests import ALONE, GROUPS

ROOT = Path(__file__).parents[2]


def test_every_gpu_test_is_run_by_gpu_test() -> None:
    run = {argument for _, *arguments in (*ALONE, *GROUPS) for argument in arguments}
    files = sorted((ROOT / "tests" / "gpu").glob("test_*.py"))
    assert files
    assert [file.name for file in files if f"tests/gpu/{file.name}" not in run] == []


def test_matrix_asks_for_the_standard_library_alone() -> None:
    """It runs before any environment is made."""
    script = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numpy", "torch", "vllm", "zmq", "msgpack", "yaml", "xxhash"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from tools.matrix import is_served
print(is_served("0.32.0"), is_served("0.20.0"))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_workflows_run_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [
        step["run"]
        for workflow in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        for job in yaml.safe_load(workflow.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step and not step["run"].startswith("sudo apt-get install ")
    ]
    assert {command.split()[0] for command in commands} == {"make"}
    called = {command.split()[1] for command in commands}
    assert called >= {"lint", "docs", "unit", "test", "wheel", "wheels"}
    assert called <= targets


def test_issue_forms_ask_for_what_a_bug_needs() -> None:
    forms = ROOT / ".github" / "ISSUE_TEMPLATE"
    bug = yaml.safe_load((forms / "bug.yml").read_text())
    asked = {field["id"] for field in bug["body"] if "id" in field}
    assert asked >= {"versions", "gpu", "model", "transfer-config", "log", "status"}
    for form in forms.glob("*.yml"):
        assert yaml.safe_load(form.read_text())
