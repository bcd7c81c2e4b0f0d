"""Who may import whom, how large a file may be, and what no file may mention: held by test."""

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("reference", "backend_hip", "suites", "fixtures", "reports")
TOP_LEVEL_MODULES = ("conftest",)

SUITES = frozenset(
    {
        *PACKAGES, "conftest", "numpy", "gguf", "rich", "tabulate", "pytest", "pytest_benchmark",
        "hypothesis", "tokenizers", "sentencepiece", "scipy", "threadpoolctl", "torch",
    }
)  # fmt: skip

# For each place, the project and third-party modules that it may import besides the standard
# library; the longest matching place decides. A name allows itself and what lies below it.
ALLOWED: Mapping[str, frozenset[str]] = {
    "reference": frozenset({"reference", "numpy"}),
    # gguf-py's quantisers make the bytes of test models; no forward pass calls this file.
    "reference/quantise.py": frozenset({"reference", "numpy", "gguf"}),
    "reference/model": frozenset(
        {"reference.model", "numpy", "gguf", "tokenizers", "sentencepiece", "platformdirs"}
    ),
    "backend_hip": frozenset({"backend_hip", "reference.model", "numpy"}),
    "backend_hip/device.py": frozenset({"backend_hip", "reference.model", "numpy", "hip"}),
    "fixtures": frozenset({"fixtures", "reference", "numpy", "gguf"}),
    "reports": frozenset({"reports", "tabulate", "rich", "matplotlib"}),
    "suites": SUITES,
    # Drives the CPU runtime as hip-python sees it, below the device layer, in processes of its own.
    "suites/correctness/cpu_driver.py": SUITES | {"hip"},
}  # fmt: skip

LINE_LIMITS: Mapping[str, int] = {
    ".py": 400, ".hip": 400, ".h": 400, ".cpp": 400, ".S": 400,
}  # fmt: skip

# The paths are written in two pieces, so that this file does not break its own rule.
FORBIDDEN = tuple(
    re.compile(pattern)
    for pattern in (r"(?<![\w.])/wo" + r"rk/", r"/tmp" + r"/w\b", r"\.\./sha" + r"red\b")
)


def sources(root: Path) -> list[Path]:
    """Every Python file of the packages and at the top level, sorted."""
    files = [file for package in PACKAGES for file in (root / package).rglob("*.py")]
    files += [root / f"{name}.py" for name in TOP_LEVEL_MODULES if (root / f"{name}.py").is_file()]
    return sorted(files)


def imported(path: Path, root: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file imports, anywhere in it, with its line; relative ones resolved."""
    package = ".".join(path.relative_to(root).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                above = ".".join(parts[: len(parts) - node.level + 1])
                base = f"{above}.{base}".strip(".")
            # `from package import module` names the module only in its list.
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node) and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, node.lineno


def _is_dynamic_import(node: ast.Call) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else None
    plain = node.func.id if isinstance(node.func, ast.Name) else None
    return "import_module" in (name, plain) or plain == "__import__"


def _allowed(path: Path, root: Path) -> frozenset[str]:
    relative = path.relative_to(root).as_posix()
    places = [place for place in ALLOWED if relative == place or relative.startswith(place + "/")]
    return ALLOWED[max(places, key=len)] if places else ALLOWED["suites"]  # conftest.py


def import_violations(root: Path) -> list[str]:
    found = []
    for path in sources(root):
        allowed = _allowed(path, root)
        for module, line in imported(path, root):
            if module.split(".")[0] in sys.stdlib_module_names:
                continue
            if not any(module == name or module.startswith(name + ".") for name in allowed):
                found.append(f"{path.relative_to(root).as_posix()}:{line} imports {module}")
    return found


def _text_files(root: Path) -> Iterator[Path]:
    """What git tracks or would track, where there is a repository, else everything."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        capture_output=True,
        check=False,
    )
    names = listed.stdout.decode().split("\0") if listed.returncode == 0 else []
    files = [root / name for name in names if name] or sorted(root.rglob("*"))
    yield from (file for file in files if file.is_file())


def size_violations(root: Path) -> list[str]:
    found = []
    for file in _text_files(root):
        limit = LINE_LIMITS.get(file.suffix)
        if limit is not None:
            lines = len(file.read_text(encoding="utf-8").splitlines())
            if lines > limit:
                found.append(
                    f"{file.relative_to(root).as_posix()} has {lines} lines, at most {limit}"
                )
    return found


def path_violations(root: Path) -> list[str]:
    found = []
    for file in _text_files(root):
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a binary golden
        for pattern in FORBIDDEN:
            match = pattern.search(text)
            if match is not None:
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{file.relative_to(root).as_posix()}:{line} mentions {match[0]}")
    return found


def test_something_is_looked_at() -> None:
    seen = {path.relative_to(ROOT).parts[0] for path in sources(ROOT)}
    assert seen >= set(PACKAGES)
    assert len(list(_text_files(ROOT))) > 50


def test_imports_stay_within_their_package() -> None:
    assert import_violations(ROOT) == []


def test_no_other_top_level_package() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(PACKAGES)


def test_files_stay_small() -> None:
    assert size_violations(ROOT) == []


def test_no_file_mentions_where_it_was_written() -> None:
    assert path_violations(ROOT) == []


PLANTED = [
    ("backend_hip/ops.py", "from reference import forward", "reference.forward"),
    ("backend_hip/ops.py", "import reference.ops", "reference.ops"),
    ("backend_hip/engine.py", "def late() -> None:\n    from suites import cli", "suites.cli"),
    ("backend_hip/engine.py", "if TYPE_CHECKING:\n    import fixtures.tiny", "fixtures.tiny"),
    ("backend_hip/engine.py", "from hip import hip", "hip.hip"),
    ("backend_hip/engine.py", "import importlib\nimportlib.import_module('hip')", "hip"),
    ("suites/cli.py", "from hip import hip", "hip.hip"),
    ("reference/ops.py", "from backend_hip import registry", "backend_hip.registry"),
    ("reference/ops.py", "import gguf", "gguf"),
    ("reference/model/spec.py", "from reference import ops", "reference.ops"),
    ("reference/model/spec.py", "from .. import ops", "reference.ops"),
    ("fixtures/tiny.py", "import backend_hip.engine", "backend_hip.engine"),
    ("reports/__init__.py", "import numpy", "numpy"),
    ("reports/__init__.py", "from suites.harness import verdict", "suites.harness.verdict"),
]


@pytest.mark.parametrize(
    ("file", "statement", "module"), PLANTED, ids=[f"{f}-{m}" for f, _, m in PLANTED]
)
def test_a_planted_import_is_seen(tmp_path: Path, file: str, statement: str, module: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    shutil.copyfile(ROOT / file, path)
    assert import_violations(tmp_path) == []
    path.write_text(path.read_text(encoding="utf-8") + f"\n\n{statement}\n", encoding="utf-8")
    (found,) = import_violations(tmp_path)
    assert found.startswith(f"{file}:")
    assert found.endswith(f" imports {module}")


def test_a_planted_long_file_and_path_are_seen(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("\n" * 401)
    (tmp_path / "kernel.hip").write_text("\n" * 401)
    (tmp_path / "fits.py").write_text("\n" * 400)
    (tmp_path / "mention.md").write_text("fine\nsee /wo" + "rk/main\n")
    (tmp_path / "other.txt").write_text("sha" + "red/spec is fine, ../sha" + "red/spec is not")
    assert sorted(size_violations(tmp_path)) == [
        "kernel.hip has 401 lines, at most 400",
        "long.py has 401 lines, at most 400",
    ]
    assert sorted(found.split(" ")[0] for found in path_violations(tmp_path)) == [
        "mention.md:2",
        "other.txt:1",
    ]
