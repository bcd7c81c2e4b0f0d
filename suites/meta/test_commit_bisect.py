"""The search for a commit, with probes that are made up: git is real, models are not needed."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from reference.model.errors import AssayError, InputError
from suites.harness.commit_bisect import Finding, Judged, Mark, Run, find, judge
from suites.harness.git_worktree import Git, GitSearch, find_ends, open_repository
from suites.harness.git_worktree import temporary_worktree as worktree
from suites.harness.repeats import Plan, plan_runs
from suites.harness.tolerances import FLOAT64_SUMS
from suites.meta import history

LENGTH = 30
OK, FAULT, BROKEN = Run(Mark.GOOD, "ok"), Run(Mark.BAD, "a link"), Run(Mark.SKIP, "no build")
ONCE = plan_runs()


@dataclass
class Line:
    """A search over commits "0", "1", ... that halves what is left; skipped ones are passed by."""

    count: int
    good: int = 0
    bad: int = 0
    here: str = ""
    skipped: set[int] = field(default_factory=set)

    def check_out(self, commit: str) -> None:
        self.here = commit

    def start(self, good: str, bad: str) -> None:
        self.good, self.bad = int(good), int(bad)
        self._next()

    def current(self) -> str:
        return self.here

    def mark(self, commit: str, mark: Mark) -> None:
        if mark is Mark.GOOD:
            self.good = int(commit)
        elif mark is Mark.BAD:
            self.bad = int(commit)
        else:
            self.skipped.add(int(commit))
        self._next()

    def candidates(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.good + 1, self.bad + 1)))

    def _next(self) -> None:
        left = [n for n in range(self.good + 1, self.bad) if n not in self.skipped]
        middle = (self.good + self.bad) / 2
        self.here = str(min(left, key=lambda n: abs(n - middle), default=self.bad))


def _search(probe: Callable[[int], Run], plan: Plan = ONCE, length: int = LENGTH) -> Finding:
    line = Line(length)
    return find(
        line, "0", str(length - 1), lambda: probe(int(line.here)), plan, lambda judged: None
    )


def _faulty_from(position: int, *broken: int) -> Callable[[int], Run]:
    return lambda n: BROKEN if n in broken else FAULT if n >= position else OK


@pytest.mark.parametrize("position", range(1, LENGTH))
def test_every_position_is_found(position: int) -> None:
    finding = _search(_faulty_from(position))
    assert finding.first_bad == str(position)
    assert len(finding.judged) <= 2 + 5
    before, after = finding.of(str(position - 1)), finding.of(str(position))
    assert before == Judged(str(position - 1), Mark.GOOD, "ok", 1, 0)
    assert after == Judged(str(position), Mark.BAD, "a link", 1, 1)


@pytest.mark.parametrize("position", range(3, LENGTH - 3))
def test_a_skipped_commit_elsewhere_does_not_matter(position: int) -> None:
    for broken in {1, 14, 15, LENGTH - 2} - {position, position - 1}:
        finding = _search(_faulty_from(position, broken))
        assert finding.first_bad == str(position)


@pytest.mark.parametrize("position", range(3, LENGTH - 3))
def test_skipped_neighbours_leave_all_that_it_can_be(position: int) -> None:
    finding = _search(_faulty_from(position, position - 1))
    assert (finding.first_bad, finding.candidates) == (None, (str(position - 1), str(position)))
    finding = _search(_faulty_from(position, position, position + 1))
    names = tuple(str(position + step) for step in range(3))
    assert (finding.first_bad, finding.candidates) == (None, names)
    assert [entry.commit for entry in finding.skipped] == sorted(
        names[:2], key=lambda name: [j.commit for j in finding.judged].index(name)
    )
    assert {entry.text for entry in finding.skipped} == {"no build"}


def test_all_between_skipped() -> None:
    finding = _search(_faulty_from(LENGTH - 1, *range(1, LENGTH - 1)))
    assert finding.first_bad is None
    assert len(finding.candidates) == LENGTH - 1


def test_neighbouring_ends_need_no_more_probes() -> None:
    finding = _search(_faulty_from(1), length=2)
    assert (finding.first_bad, len(finding.judged)) == ("1", 2)


@pytest.mark.parametrize(
    ("probe", "text"),
    [
        (lambda n: FAULT, "GOOD diverges too: a link"),
        (lambda n: OK, "BAD does not diverge: its run ended with ok"),
        (lambda n: FAULT if n == 0 else OK, "GOOD diverges too: a link"),
        (lambda n: BROKEN if n == 0 else FAULT, "GOOD can't be judged: no build"),
        (lambda n: BROKEN if n else OK, "BAD can't be judged: no build"),
    ],
    ids=["all-bad", "all-good", "swapped", "good-broken", "bad-broken"],
)
def test_an_unproved_end_stops_it(probe: Callable[[int], Run], text: str) -> None:
    seen: list[int] = []

    def counted(n: int) -> Run:
        seen.append(n)
        return probe(n)

    with pytest.raises(InputError) as raised:
        _search(counted)
    assert text in str(raised.value)
    assert set(seen) <= {0, LENGTH - 1}


def test_a_search_that_repeats_itself_ends() -> None:
    class Stuck(Line):
        def mark(self, commit: str, mark: Mark) -> None:
            pass

    line = Stuck(LENGTH)
    with pytest.raises(AssayError, match="again"):
        find(line, "0", "29", lambda: _faulty_from(9)(int(line.here)), ONCE, lambda judged: None)


# --- faults that show only sometimes --------------------------------------------------------------


def test_numbers_of_probes() -> None:
    assert plan_runs(0.2, 0.05).runs == 14
    assert plan_runs(0.2, 0.01).runs == 21
    assert plan_runs(0.2).runs == 21
    assert plan_runs().runs == 1
    assert plan_runs(0.9, 0.01).runs == 2  # 0.1 squared is 0.01: fractions, not floats, decide
    assert plan_runs(0.5, 0.5).runs == 1
    assert plan_runs(0.2, 0.05).miss == pytest.approx(0.8**14, rel=FLOAT64_SUMS)
    assert plan_runs(0.2, runs=5).miss == pytest.approx(0.8**5, rel=FLOAT64_SUMS)
    assert plan_runs(1.0).miss == 0.0
    assert plan_runs(0.001).runs == 4603


def test_errors_with_a_noisy_judge() -> None:
    plan = plan_runs(0.5, 0.05, failing=3, noise=0.02)
    fewer = plan_runs(0.5, failing=3, noise=0.02, runs=plan.runs - 1)
    assert plan.miss <= 0.05 < fewer.miss
    assert plan.runs == 11  # 1 - P(3 or more of 11 at 1/2) = (1 + 11 + 55) / 2048
    assert plan.miss == pytest.approx(67 / 2048, rel=FLOAT64_SUMS)
    zero_to_two = 0.98**11 + 11 * 0.02 * 0.98**10 + 55 * 0.02**2 * 0.98**9
    assert plan.false_alarm == pytest.approx(1 - zero_to_two, rel=FLOAT64_SUMS)


def test_the_error_of_a_whole_bisection() -> None:
    plan = plan_runs(0.2, 0.05)
    assert plan.error_over(6, 0) == pytest.approx(1 - (1 - 0.8**14) ** 6, rel=FLOAT64_SUMS)
    assert plan.error_over(0, 6) == 0.0
    assert plan_runs().error_over(9, 9) == 0.0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rate": 0.0}, "--rate is 0.0"),
        ({"rate": 1.5}, "--rate is 1.5"),
        ({"rate": float("nan")}, "--rate is nan"),
        ({"error": 0.0}, "--error is 0.0"),
        ({"error": float("nan")}, "--error is nan"),
        ({"failing": 0}, "--at-least is 0"),
        ({"runs": 0}, "--probes is 0"),
        ({"runs": 2, "failing": 3}, "--probes is 2"),
        ({"runs": 2, "error": 0.1}, "--error goes with"),
        ({"rate": 0.5, "noise": 0.5}, "--noise is 0.5"),
        ({"noise": float("nan")}, "--noise is nan"),
        ({"rate": 0.5, "noise": 0.1}, "expected more because 7 runs of a sound commit"),
        ({"rate": 0.0001}, "even 10,000 probes"),
    ],
    ids=str,
)
def test_figures_that_are_refused(arguments: dict[str, float], text: str) -> None:
    with pytest.raises(InputError) as raised:
        plan_runs(**arguments)  # type: ignore[arg-type]
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def _runs(*marks: Run) -> Callable[[], Run]:
    left: Iterator[Run] = iter(marks)
    return lambda: next(left)  # one run too many raises StopIteration


def test_a_commit_is_probed_until_it_is_decided() -> None:
    plan = plan_runs(0.5, runs=4)
    assert judge("c", _runs(OK, FAULT), plan) == Judged("c", Mark.BAD, "a link", 2, 1)
    assert judge("c", _runs(OK, OK, OK, OK), plan) == Judged("c", Mark.GOOD, "ok", 4, 0)
    assert judge("c", _runs(OK, BROKEN), plan) == Judged("c", Mark.SKIP, "no build", 2, 0)
    noisy = plan_runs(0.9, runs=4, failing=2, noise=0.1)
    assert judge("c", _runs(FAULT, OK, OK, OK), noisy).mark is Mark.GOOD
    assert judge("c", _runs(OK, OK, OK), noisy).runs == 3  # two can't fail any more
    assert judge("c", _runs(FAULT, OK, FAULT), noisy).mark is Mark.BAD


def _sometimes_from(position: int, seed: int) -> Callable[[int], Run]:
    """Fails one run in five; the last commit always, so that BAD is proved."""
    chance = random.Random(seed)
    last = LENGTH - 1
    return lambda n: FAULT if n == last or (n >= position and chance.random() < 0.2) else OK


def _times_missed(plan: Plan, seeds: int) -> int:
    positions = {seed: 1 + seed % (LENGTH - 1) for seed in range(seeds)}
    return sum(
        _search(_sometimes_from(position, seed), plan).first_bad != str(position)
        for seed, position in positions.items()
    )


def test_a_fault_in_one_run_of_five_is_found_as_often_as_promised() -> None:
    seeds = 200
    promised = plan_runs(0.2, 0.01)
    assert _times_missed(promised, seeds) <= seeds * promised.error_over(6, 0)
    assert _times_missed(plan_runs(0.2, runs=1), seeds) > seeds / 2  # one probe is not enough


def test_a_judge_that_errs_needs_more_than_one_failure() -> None:
    plan = plan_runs(0.8, 0.01, failing=4, noise=0.05)
    for seed in range(40):
        position = 1 + seed % (LENGTH - 1)
        assert _search(_noisy_from(position, seed), plan).first_bad == str(position)


def _noisy_from(position: int, seed: int) -> Callable[[int], Run]:
    chance = random.Random(seed)
    return lambda n: FAULT if chance.random() < (0.8 if n >= position else 0.05) else OK


# --- with git ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("line") / "r"
    return folder, history.linear(folder, LENGTH)


def _git_search(
    folder: Path, good: str, bad: str, probe: Callable[[int], Run], plan: Plan = ONCE
) -> Finding:
    git = open_repository(folder)
    ends = find_ends(git, good, bad)
    with worktree(git, ends[0]) as (tree, _):
        number = tree / "number"

        def run() -> Run:
            found = probe(int(number.read_text()))
            number.write_text("what a probe leaves behind")
            (tree / "left").write_text("more of it")
            return found

        finding = find(GitSearch(tree), *ends, run, plan, lambda judged: None)
    assert not tree.exists()
    return finding


@pytest.mark.parametrize("position", [1, 2, 15, 28, 29])
def test_git_finds_the_commit(line: tuple[Path, list[str]], position: int) -> None:
    folder, hashes = line
    before = history.snapshot(folder)
    broken = [n for n in (10, 14, 20) if n not in (position, position - 1)]
    finding = _git_search(folder, hashes[0], "main", _faulty_from(position, *broken))
    assert finding.first_bad == hashes[position]
    assert history.snapshot(folder) == before


def test_git_lists_what_skips_hide(line: tuple[Path, list[str]]) -> None:
    folder, hashes = line
    finding = _git_search(folder, hashes[3], "main", _faulty_from(12, 11, 12))
    assert finding.first_bad is None
    assert finding.candidates == tuple(hashes[11:14])


def test_git_crosses_a_merge(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    hashes = history.linear(folder, 3)
    history.git(folder, "checkout", "-q", "-b", "side")
    for number in (100, 101, 102):
        (folder / "number").write_text(str(number))
        hashes.append(history.commit(folder, f"side {number}"))
    history.git(folder, "checkout", "-q", "main")
    (folder / "other").write_text("x")
    history.commit(folder, "main goes on")
    history.git(folder, "merge", "-q", "--no-edit", "side")
    finding = _git_search(folder, hashes[0], "main", _faulty_from(101))
    assert finding.first_bad == hashes[4]


def test_a_bisect_of_the_users_own_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    hashes = history.linear(folder, 8)
    history.git(folder, "bisect", "start", hashes[7], hashes[0])
    (folder / "number").write_text("edited")
    (folder / "new").write_text("untracked")
    before = history.snapshot(folder)
    assert before["bisect"]
    assert _git_search(folder, hashes[0], hashes[7], _faulty_from(5)).first_bad == hashes[5]
    assert history.snapshot(folder) == before
    assert (folder / "number").read_text() == "edited"


def test_hooks_and_variables_of_a_surrounding_git_do_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r"
    hashes = history.linear(folder, 4)
    hook = folder / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(folder / ".git" / "index"))
    before = history.snapshot(folder)
    assert _git_search(folder, hashes[0], hashes[3], _faulty_from(2)).first_bad == hashes[2]
    assert history.snapshot(folder) == before
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_worktree_goes_however_it_ends(
    line: tuple[Path, list[str]], error: type[BaseException]
) -> None:
    folder, hashes = line
    before = history.snapshot(folder)

    def stop(number: int) -> Run:
        raise error

    with pytest.raises(error):
        _git_search(folder, hashes[0], "main", stop)
    assert history.snapshot(folder) == before


@pytest.mark.parametrize(
    ("good", "bad", "text"),
    [
        ("main", "main", "expected two commits"),
        ("main", "main~5", "GOOD is main, expected an ancestor of BAD (main~5)"),
        ("elsewhere", "main", "GOOD is 'elsewhere', expected a commit"),
        ("main~5", "main:number", "BAD is 'main:number', expected a commit"),
        ("--all", "main", "GOOD is '--all', expected a commit"),
        ("", "main", "GOOD is '', expected a commit"),
    ],
)
def test_ends_that_are_refused(
    line: tuple[Path, list[str]], good: str, bad: str, text: str
) -> None:
    with pytest.raises(InputError) as raised:
        find_ends(open_repository(line[0]), good, bad)
    assert text in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(InputError, match="expected a folder of a git repository"):
        open_repository(tmp_path)
    with pytest.raises(InputError, match="expected a folder that exists"):
        open_repository(tmp_path / "none")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="not installed"):
        Git(tmp_path)("status")
