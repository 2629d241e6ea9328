"""Imports point down only; the lower rooms need neither torch nor vLLM."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "vllm_tiered_kv"
LAYERS = [
    {"connector", "server", "api"},
    {"remote", "stores"},
    {"cache", "device"},
    {"wire", "metrics", "native"},
    {"core"},
    {"config", "options", "errors"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
# Within a level rooms do not know each other, with these exceptions.
ALLOWED_ASIDE: set[tuple[str, str]] = {
    ("config", "errors"),
    ("config", "options"),
    ("options", "errors"),
}
FOREIGN = {"connector": {"vllm", "torch"}}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


FILES = [
    path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.stem in LEVEL
]


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 20
    assert {room_of(path) for path in FILES} <= set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(PACKAGE).as_posix())
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "vllm_tiered_kv" and len(parts) > 1 and parts[1] in LEVEL:
            other = parts[1]
            down = LEVEL[other] > LEVEL[room]
            assert other == room or down or (room, other) in ALLOWED_ASIDE, f"{room} -> {name}"
        if parts[0] in ("vllm", "torch"):
            assert parts[0] in FOREIGN.get(room, ()), f"{room} imports {name}"


@pytest.mark.parametrize(
    ("folder", "other"),
    [
        ("connector/scheduler", "connector/worker"),
        ("connector/worker", "connector/scheduler"),
        ("connector/identity", "connector/scheduler"),
        ("connector/identity", "connector/worker"),
    ],
)
def test_folders_of_other_processes_are_not_imported(folder: str, other: str) -> None:
    """Scheduler and worker live in different processes; `metadata.py` is what passes between."""
    files = sorted((PACKAGE / folder).glob("*.py"))
    assert files
    prefix = f"vllm_tiered_kv.{other.replace('/', '.')}"
    for path in files:
        assert not [name for name in imports(path) if name.startswith(prefix)], path.name


def test_lower_packages_load_without_torch_and_vllm() -> None:
    has_obstore = sys.version_info >= (3, 11)
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in FILES
        if room_of(path) != "connector"
        and path.stem != "__init__"
        and (has_obstore or path.parent.name != "s3")
    ]
    program = (
        "import sys, importlib\n"
        "sys.modules['torch'] = sys.modules['vllm'] = None\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, check=True)


def test_registering_does_not_load_the_connector() -> None:
    program = (
        "import sys, vllm_tiered_kv.connector.plugin\n"
        "assert 'vllm_tiered_kv.connector.connector' not in sys.modules\n"
        "assert 'vllm' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=PACKAGE.parent, check=True)


def test_oldest_entries_are_removed_from_ordered_dicts() -> None:
    """`next(iter(...))` of a dict passes over all entries that were deleted before the first one:
    to remove many this way takes time that grows with the square of their number."""
    removals = (
        r"del (self\.\w+)\[next\(iter\(\1\)\)\]",
        r"(self\.\w+)\.pop\(next\(iter\(\1\)\)",
        r"(\w+) = next\(iter\((self\.\w+)\)\)\n.*(?:\2\.pop\(\1\)|del \2\[\1\])",
    )
    for path in FILES:
        text = path.read_text()
        assert not any(re.search(removal, text) for removal in removals), path


def test_each_part_of_a_request_state_has_one_writer() -> None:
    """Else whoever reads a part has to know what all others may do to it."""
    written: dict[str, set[str]] = {}
    for path in (PACKAGE / "connector").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            for target in targets:
                for part in re.findall(r"\bstate\.(\w+)", ast.unparse(target)):
                    written.setdefault(part, set()).add(path.name)
    assert written == {
        "account": {"miss_causes.py"},
        "keys": {"scheduler_half.py"},
        "lost_adapter": {"scheduler_half.py"},
        "load": {"load_planner.py"},
        "remote": {"remote_tier.py"},
        "store": {"store_planner.py"},
        "verification": {"verification.py"},
    }
