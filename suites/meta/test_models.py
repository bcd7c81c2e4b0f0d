"""The tests' own models leave nothing behind."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_built_models_are_gone_when_the_process_ends(tmp_path: Path) -> None:
    code = (
        "from suites.meta.models import tiny_model\n"
        "import os, tempfile\n"
        "path = tiny_model('tiny-llama').file.path\n"
        "assert path.is_file() and str(path).startswith(tempfile.gettempdir())\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, check=True)
    assert list(tmp_path.iterdir()) == []
