"""git for commit bisects: facts about commits, and a search in a worktree of its own.

git keeps HEAD, index and bisect state per worktree, so that nothing of the user's checkout changes.
Hooks don't run here, and variables that point git at another repository are dropped.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reference.model.errors import InputError
from suites.harness.commit_bisect import Mark
from suites.harness.interrupts import deaf, ended_as_by_interrupt

_POINTERS = (
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_PREFIX", "GIT_NAMESPACE", "GIT_GRAFT_FILE",
    "GIT_EXTERNAL_DIFF",
)  # fmt: skip
_SETTINGS = (
    "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.quotePath=false",
    "advice.detachedHead=false", "log.showSignature=false",
)  # fmt: skip
_FIELDS = ("%H", "%h", "%an <%ae>", "%aI", "%s", "%P")


@dataclass(frozen=True)
class Commit:
    """`date` is the author's, in ISO 8601; `short` is the hash as git shortens it here."""

    hash: str
    short: str
    author: str
    date: str
    subject: str
    parents: tuple[str, ...]


@dataclass(frozen=True)
class Git:
    """Runs git in `folder`."""

    folder: Path

    def __call__(self, *arguments: str) -> str:
        """What git prints; InputError with its first line where it fails."""
        done = self.attempt(*arguments)
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["it gave no reason"]
            raise InputError(f"git {arguments[0]}: {lines[0]}")
        return done.stdout

    def attempt(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """The finished process, whatever its exit code."""
        settings = [part for setting in _SETTINGS for part in ("-c", setting)]
        environment = {name: v for name, v in os.environ.items() if name not in _POINTERS}
        try:
            return subprocess.run(
                ["git", "-C", str(self.folder), *settings, *arguments],
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                check=False,
                stdin=subprocess.DEVNULL,
                env={**environment, "LC_ALL": "C", "GIT_PAGER": "cat"},
            )
        except FileNotFoundError:
            raise InputError("git: the program is not installed, expected it in PATH") from None

    def commit(self, commit: str) -> Commit:
        values = self("log", "-1", f"--format={'%x00'.join(_FIELDS)}", commit).strip("\n")
        full, short, author, date, subject, parents = values.split("\0")
        return Commit(full, short, author, date, subject, tuple(parents.split()))

    def files(self, commit: Commit) -> tuple[str, ...]:
        """The paths that a commit changed against its first parent."""
        listed = self("diff", "--no-ext-diff", "--name-only", "-z", *_range(commit))
        return tuple(name for name in listed.split("\0") if name)

    def stat(self, commit: Commit, columns: int) -> str:
        """git's table of the files that a commit changed, and their total."""
        return self("diff", "--no-ext-diff", f"--stat={columns}", *_range(commit)).strip("\n")


def _range(commit: Commit) -> tuple[str, str, str]:
    return (commit.parents[0], commit.hash, "--")


def open_repository(folder: Path) -> Git:
    """git in the repository that `folder` lies in; InputError where there is none."""
    if not folder.is_dir():
        raise InputError(f"--repository is {folder}, expected a folder that exists")
    git = Git(folder.resolve())
    if git.attempt("rev-parse", "--git-dir").returncode != 0:
        raise InputError(f"--repository is {folder}, expected a folder of a git repository")
    return git


def find_ends(git: Git, good: str, bad: str) -> tuple[str, str]:
    """Full hashes of both ends; InputError for what can't be bisected."""
    ends = _commit_of(git, "GOOD", good), _commit_of(git, "BAD", bad)
    if ends[0] == ends[1]:
        raise InputError(f"--git: GOOD and BAD are both {ends[0][:12]}, expected two commits")
    if git.attempt("merge-base", "--is-ancestor", *ends).returncode != 0:
        raise InputError(f"--git: GOOD is {good}, expected an ancestor of BAD ({bad})")
    return ends


def _commit_of(git: Git, end: str, revision: str) -> str:
    wanted = f"{revision}^{{commit}}"
    found = git.attempt("rev-parse", "--verify", "--quiet", "--end-of-options", wanted)
    text = found.stdout.strip()
    if found.returncode != 0 or not text:
        raise InputError(f"--git: {end} is {revision!r}, expected a commit of this repository")
    return text.splitlines()[-1]


class GitSearch:
    """`git bisect` in a worktree; see commit_bisect.Search."""

    def __init__(self, worktree: Path) -> None:
        self._git = Git(worktree)
        self._bad = ""
        self._good: list[str] = []

    def check_out(self, commit: str) -> None:
        self._clean()
        self._git("checkout", "--quiet", "--detach", "--force", commit)

    def start(self, good: str, bad: str) -> None:
        self._clean()
        self._bad, self._good = bad, [good]
        self._git("bisect", "start", bad, good)

    def current(self) -> str:
        return self._git("rev-parse", "HEAD").strip()

    def mark(self, commit: str, mark: Mark) -> None:
        self._clean()
        if mark is Mark.GOOD:
            self._good.append(commit)
        elif mark is Mark.BAD:
            self._bad = commit
        done = self._git.attempt("bisect", mark.value, commit)
        # 2 means that only skipped commits are left, which candidates() tells.
        if done.returncode not in (0, 2):
            lines = (done.stderr or done.stdout).strip().splitlines() or ["it gave no reason"]
            raise InputError(f"git bisect {mark.value}: {lines[0]}")

    def candidates(self) -> tuple[str, ...]:
        listed = self._git("rev-list", self._bad, *(f"^{commit}" for commit in self._good))
        return tuple(reversed(listed.split()))

    def _clean(self) -> None:
        """What a probe left behind must neither reach the next commit nor keep git from leaving."""
        self._git("reset", "--quiet", "--hard")
        self._git("clean", "--quiet", "-ffdx")


@contextmanager
def temporary_worktree(git: Git, commit: str) -> Iterator[tuple[Path, Path]]:
    """A worktree at `commit` inside a temporary folder: (worktree, folder), both removed at the
    end.

    SIGTERM and SIGHUP end the block as an interrupt does, so that they clean up too.
    """
    with ended_as_by_interrupt():
        folder = Path(tempfile.mkdtemp(prefix="assay-bisect-")).resolve()
        # git names its own record of the worktree after this last part.
        worktree = folder / folder.name
        try:
            git("worktree", "add", "--quiet", "--detach", str(worktree), commit)
            yield worktree, folder
        finally:
            with deaf():
                # Twice --force: a worktree whose making was interrupted is still locked.
                git.attempt("worktree", "remove", "--force", "--force", str(worktree))
                shutil.rmtree(folder, ignore_errors=True)
