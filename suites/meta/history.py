"""Small git repositories for tests of commit bisects."""

import os
import subprocess
from pathlib import Path

_IDENTITY = {
    "GIT_AUTHOR_NAME": "A. Author", "GIT_AUTHOR_EMAIL": "author@example.org",
    "GIT_COMMITTER_NAME": "C. Committer", "GIT_COMMITTER_EMAIL": "committer@example.org",
    "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null",
}  # fmt: skip


def git(folder: Path, *arguments: str) -> str:
    """What git prints, stripped; free of the user's settings and of a surrounding git's."""
    around = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**around, **_IDENTITY},
    )
    return done.stdout.strip()


def start(folder: Path) -> Path:
    """An empty repository."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    return folder


def commit(folder: Path, subject: str) -> str:
    """Commits everything, even nothing; the full hash."""
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", subject)
    return git(folder, "rev-parse", "HEAD")


def linear(folder: Path, length: int) -> list[str]:
    """A repository of `length` commits in a row; commit i holds a file `number` with i in it."""
    start(folder)
    hashes = []
    for number in range(length):
        (folder / "number").write_text(str(number))
        hashes.append(commit(folder, f"number {number}"))
    return hashes


def snapshot(folder: Path) -> dict[str, str]:
    """What a bisect must leave alone: checkout, index, refs, bisect state, worktrees."""
    commands = {
        "status": ("status", "--porcelain", "--untracked-files=all"),
        "index": ("ls-files", "--stage"),
        "refs": ("for-each-ref",),
        "worktrees": ("worktree", "list", "--porcelain"),
    }
    state = {name: git(folder, *arguments) for name, arguments in commands.items()}
    files = sorted(path.name for path in (folder / ".git").glob("*BISECT*"))
    return {**state, "head": (folder / ".git" / "HEAD").read_text(), "bisect": " ".join(files)}
