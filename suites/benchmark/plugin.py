"""`--benchmark`: pytest-benchmark times and stores, the reports package prints.

Without the flag each benchmark runs once and nothing is timed. With it the stored JSON, the printed
tables and their Markdown hold only rows whose verdict is ok. Files appear in runs/ (or where
--benchmark-json says) whole or not at all.
"""

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from reports import reference_speed, speed
from reports.records import ReportError, write_text
from reports.stored import stored_document
from suites.benchmark.clock import CLOCK

# pytest-benchmark's options that mean nothing unless something is timed.
_NEED_TIMING = (
    *("benchmark_enable", "benchmark_only", "benchmark_json", "benchmark_save"),
    *("benchmark_autosave", "benchmark_compare", "benchmark_histogram"),
)
_CONTRADICT_TIMING = ("benchmark_disable", "benchmark_skip")

JSON_TARGET: "pytest.StashKey[Path]" = pytest.StashKey()
UNVERIFIED: "pytest.StashKey[list[str]]" = pytest.StashKey()
SUMMARY: "pytest.StashKey[str]" = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)  # before pytest-benchmark reads its options
def pytest_configure(config: pytest.Config) -> None:
    options = config.option
    timing = config.getoption("--benchmark")
    wrong = _CONTRADICT_TIMING if timing else _NEED_TIMING
    for name in wrong:
        if getattr(options, name, None):
            flag = f"--{name.replace('_', '-')}"
            raise pytest.UsageError(
                f"{flag} contradicts --benchmark" if timing else f"{flag} needs --benchmark"
            )
    options.benchmark_quiet = True  # its table ranks by time and knows no verdict; ours is printed
    if not timing:
        options.benchmark_disable = True
        return
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    target = options.benchmark_json or config.rootpath / "runs" / f"benchmark-{stamp}.json"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # pytest-benchmark writes in place: it gets a temporary name, renamed once it is checked.
        part = target.with_name(f".{target.name}.part")
        part.touch()
        part.unlink()
    except OSError as error:
        raise pytest.UsageError(f"--benchmark: {target} can't be written: {error}") from None
    options.benchmark_json = part
    config.stash[JSON_TARGET] = target
    config.stash[UNVERIFIED] = []


def pytest_report_header(config: pytest.Config) -> str | None:
    """pytest-benchmark's own header names the timer that it would use by default."""
    if not config.getoption("--benchmark"):
        return None
    return f"assay: engines are timed by {CLOCK.label}, the reference by the host's clock"


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the folder that pytest-benchmark makes for files of its own, if it holds none."""
    with suppress(OSError):
        (config.invocation_params.dir / ".benchmarks").rmdir()


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(
    config: pytest.Config, benchmarks: list[Any], output_json: dict[str, Any]
) -> None:
    """Keeps rows with a verdict: one that failed after its timing must not become a figure."""
    rows = output_json["benchmarks"]
    kept = [row for row in rows if row["extra_info"].get("verdict") == "ok"]
    config.stash[UNVERIFIED] += [row["fullname"] for row in rows if row not in kept]
    for row in kept:
        row["params"] = {"id": row["param"]}  # the case itself is in extra_info
    of_reference = [row for row in kept if reference_speed.is_reference_speed(row)]
    of_decode = [row for row in kept if speed.is_speed(row)]
    others = [row for row in kept if row not in of_reference and row not in of_decode]
    output_json["benchmarks"] = others
    output_json["reference_speed"] = of_reference
    output_json["speed"] = of_decode
    output_json["without_verdict"] = config.stash[UNVERIFIED]


@pytest.hookimpl(trylast=True)  # after pytest-benchmark stored its file
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    target = config.stash.get(JSON_TARGET, None)
    if target is None or config.getoption("--collect-only"):
        return
    part = config.option.benchmark_json
    try:
        if not part.exists():
            raise ReportError("--benchmark: no benchmark was timed, so there is no table")
        markdown = target.with_suffix(".md")
        text = stored_document(part, markdown=False)
        write_text(markdown, stored_document(part, markdown=True))
        part.replace(target)
        config.stash[SUMMARY] = f"{text}\nJSON: {target}\nMarkdown: {markdown}"
    except (ReportError, OSError) as error:
        part.unlink(missing_ok=True)
        config.stash[SUMMARY] = str(error)
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    summary = terminalreporter.config.stash.get(SUMMARY, None)
    if summary is None:
        return
    terminalreporter.section("benchmark")
    terminalreporter.write_line(summary)
    for name in terminalreporter.config.stash[UNVERIFIED]:
        terminalreporter.write_line(f"no figure, because its verdict is not ok: {name}")
