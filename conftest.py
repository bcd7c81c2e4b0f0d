"""pytest's side of the suites: options, header, the device, models and engines.

device           the opened device; one runtime a process; checks what --shuffle, --sanitize say
load             load(name) -> Model, cached; any name or path of the registry; without a published
                 model's package the test does not run
engine_factory   engine_factory(model, **options) -> Engine, reset, closed for you
record_verdict   record_verdict(verdict) -> the verdict, kept for JUnit and GitHub's summary

A test marked any_model(names...) has the parameter `model`: what --model names, else those names.
"""

import os
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
from threadpoolctl import ThreadpoolController

from backend_hip import Device, Engine, open_device
from backend_hip.runtimes import RuntimeInfo, select_runtime
from backend_hip.runtimes.checking import require_checkable, set_checking
from fixtures.registry import is_large, is_registered, published_files, resolve_model
from reference.model import Model, load_model
from reference.model.errors import AssayError
from suites import summary
from suites.harness.verdict import Verdict
from suites.options import (
    DEVICE_KIND,
    ONLY_CPU,
    SELECTION,
    SUMMARY_FILE,
    add_options,
    axis_value,
    parameters_of,
    read_checking,
    read_selection,
)

pytest_plugins = ["suites.benchmark.plugin"]

RUNTIME = pytest.StashKey[RuntimeInfo | str]()  # the text says why there is none
RAN = pytest.StashKey[int]()
VERDICTS = pytest.StashKey[list[tuple[str, summary.Facts]]]()
IDLE_ENGINES = 8
MODELS_SHOWN = 8

LoadModel = Callable[[str], Model]


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser.getgroup("assay", "Assay").addoption)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[SELECTION] = read_selection(config.getoption)
    config.stash[DEVICE_KIND] = None
    config.stash[RAN] = 0
    config.stash[VERDICTS] = []
    # Commands that tests run must not write into the summary of the whole run.
    config.stash[SUMMARY_FILE] = os.environ.pop(summary.VARIABLE, "")
    _require_models(config.stash[SELECTION].model)
    device, required = config.getoption("--device"), config.getoption("--require-gpu")
    try:
        runtime = select_runtime(device)
    except AssayError as error:
        if required or device != "auto":
            raise pytest.UsageError(str(error)) from None
        config.stash[RUNTIME] = str(error)
        return
    if required and runtime.kind == "cpu":
        raise pytest.UsageError(
            f"--require-gpu: --device {device} means the cpu runtime here, expected a GPU"
        )
    try:
        require_checkable(runtime, read_checking(config.getoption))
    except AssayError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[RUNTIME] = runtime
    config.stash[DEVICE_KIND] = runtime.kind


def _require_models(names: tuple[str, ...]) -> None:
    """Refuses a mistyped model before anything is collected; builds nothing."""
    for name in names:
        try:
            missing = not is_registered(name) and not resolve_model(name).is_file()
        except AssayError as error:
            raise pytest.UsageError(f"--model: {error}") from None
        if missing:
            raise pytest.UsageError(f"--model: {name} is no file, expected a GGUF file")


def pytest_report_header(config: pytest.Config) -> list[str]:
    runtime = config.stash[RUNTIME]
    if isinstance(runtime, str):
        return [f"assay: no runtime, tests that need a device do not run ({runtime})"]
    label = "emulated" if runtime.kind == "cpu" else runtime.kind
    checking = read_checking(config.getoption).options
    tail = f", {checking}" if checking else ""
    seed = config.getoption("--relation-seed")
    drawn = [] if seed is None else [f"assay: relations drawn by --relation-seed {seed}"]
    return [f"assay: runtime {runtime.kind} ({label}), compiler {runtime.compiler}{tail}", *drawn]


def pytest_report_collectionfinish(items: list[pytest.Item]) -> list[str]:
    """Names the models that run, once it is known which do."""
    found = (axis_value(parameters_of(item), "model") for item in items)
    names = list(dict.fromkeys(name for name in found if name is not None))
    if len(names) > MODELS_SHOWN:
        names[MODELS_SHOWN:] = [f"and {len(names) - MODELS_SHOWN} more"]
    return [f"assay: models {', '.join(names)}"] if names else []


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that the test starts obey SIGINT, though pytest may be a job in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# --- what is run --------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for mark in metafunc.definition.iter_markers("any_model"):
        metafunc.parametrize("model", metafunc.config.stash[SELECTION].model or mark.args)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection = config.stash[SELECTION]
    cases = [parameters_of(item) for item in items]
    unmatched = selection.unmatched(cases)
    if unmatched:
        raise pytest.UsageError(f"no collected test has {', '.join(unmatched)}")
    kept = [selection.keeps(case) for case in cases]
    if config.getoption("--relation"):
        kept = ["relation" in case for case in cases]
        if not any(kept):
            raise pytest.UsageError("no collected test takes --relation")
    dropped = [item for item, keep in zip(items, kept, strict=True) if not keep]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # A test that got its device may still skip itself, for what only the CPU runtime checks.
    about_device = report.when == "setup" and "device" in getattr(item, "fixturenames", ())
    skipped = report.skipped and not hasattr(report, "wasxfail")
    meant = item.stash.get(ONLY_CPU, False)
    if skipped and about_device and not meant and item.config.getoption("--require-gpu"):
        report.outcome = "failed"
        report.longrepr = f"--require-gpu: {item.nodeid} was skipped: {report.longrepr}"
    if report.when == "call" and not report.skipped:
        item.config.stash[RAN] += 1
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A run in which every test was skipped has proved nothing."""
    asked_to_run = session.testscollected and not session.config.getoption("--collect-only")
    if asked_to_run and exitstatus == pytest.ExitCode.OK and not session.config.stash[RAN]:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    verdicts = session.config.stash[VERDICTS]
    if verdicts:
        summary.append(summary.section_of_tests(verdicts), session.config.stash[SUMMARY_FILE])


# --- device and models --------------------------------------------------------------------------


def _in_ci() -> bool:
    return os.environ.get("CI") == "true"


def _without_device(config: pytest.Config, reason: str) -> None:
    if config.getoption("--require-gpu"):
        pytest.fail(f"--require-gpu: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> Iterator[Device]:
    """The device that --device chose."""
    runtime = pytestconfig.stash[RUNTIME]
    if isinstance(runtime, str):
        if _in_ci():
            pytest.fail(runtime, pytrace=False)
        _without_device(pytestconfig, runtime)
    with open_device(pytestconfig.getoption("--device")) as opened:
        set_checking(read_checking(pytestconfig.getoption))
        yield opened


@pytest.fixture(scope="session")
def load() -> LoadModel:
    """Model by registry name or path. A published one whose package is not installed skips the
    test, and fails it in CI.
    """
    loaded = cache(lambda name: load_model(resolve_model(name)))

    def load_or_skip(name: str) -> Model:
        row = published_files().get(name)
        if row is not None and find_spec(row.module) is None:
            reason = f"{name} is not installed: pip install {row.requires}"
            if _in_ci():
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)
        return loaded(name)

    return load_or_skip


@pytest.fixture(scope="session")
def _pools() -> ThreadpoolController:
    return ThreadpoolController()


@pytest.fixture(autouse=True)
def _blas_threads(request: pytest.FixtureRequest, _pools: ThreadpoolController) -> Iterator[None]:
    """One BLAS thread, because more only wait for each other on tiny matrices; all of them where
    the test's model is a published one or a file.
    """
    name = axis_value(parameters_of(request.node), "model")
    large = name is not None and is_large(name)
    with nullcontext() if large else _pools.limit(limits=1, user_api="blas"):
        yield


# --- verdicts -----------------------------------------------------------------------------------


@pytest.fixture
def record_verdict(request: pytest.FixtureRequest) -> Callable[[Verdict], Verdict]:
    """record_verdict(verdict) -> verdict: its facts become properties of the test (--junitxml) and
    a row of the table in GitHub's job summary. Model and runtime are those of the test.
    """
    model = axis_value(parameters_of(request.node), "model") or ""
    used = "device" in request.fixturenames
    runtime = request.getfixturevalue("device").label if used else ""

    def record(verdict: Verdict) -> Verdict:
        facts = summary.facts_of(verdict, model, runtime)
        request.node.user_properties.extend(facts.properties())
        request.config.stash[VERDICTS].append((request.node.name, facts))
        return verdict

    return record


# --- engines ------------------------------------------------------------------------------------


class EnginePool:
    """Keeps built engines between tests: uploads and modules are dear, a reset is not.

    At most IDLE_ENGINES wait unused; the one that waited longest is closed first.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._idle: list[tuple[Any, Engine]] = []

    def take(self, model: Model, options: dict[str, Any]) -> tuple[Any, Engine]:
        """An engine that nobody else uses and the key to give it back under (None: to close)."""
        key: Any = (model.file.path, tuple(sorted(options.items())))
        try:
            hash(key)
        except TypeError:
            key = None
        if {"judge", "registry", "progress"} & options.keys():
            key = None
        for place, (found, _) in enumerate(self._idle):
            if key is not None and found == key:
                return self._idle.pop(place)
        return key, Engine(model, self._device, **options)

    def give_back(self, key: Any, engine: Engine) -> None:
        try:
            engine.reset()
        except AssayError:
            return  # a device error broke it, and freeing its memory would fail as well
        if key is None:
            engine.close()
            return
        self._idle.append((key, engine))
        if len(self._idle) > IDLE_ENGINES:
            self._idle.pop(0)[1].close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()


@pytest.fixture(scope="session")
def engine_pool(device: Device) -> Iterator[EnginePool]:
    pool = EnginePool(device)
    yield pool
    pool.close()


@pytest.fixture
def engine_factory(engine_pool: EnginePool) -> Iterator[Callable[..., Engine]]:
    """Engine(model, device, **options) without building it anew for each test.

    Two calls in one test give two engines. Don't close them.
    """
    taken: list[tuple[Any, Engine]] = []

    def make(model: Model, **options: Any) -> Engine:
        taken.append(engine_pool.take(model, options))
        return taken[-1][1]

    yield make
    for key, engine in taken:
        engine_pool.give_back(key, engine)
