"""pytest's side of the suites: options, header, the device, models and engines.

device           the opened device; one runtime a process
load             load(name) -> Model, cached; any name or path of the registry
tiny_model       the same for the tiny models only
real_model       the same for published models; without their package the test does not run
engine_factory   engine_factory(model, **options) -> Engine, reset, closed for you
model_name       parameter: the models that --model names, else the tiny ones
"""

import os
from collections.abc import Callable, Generator, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from backend_hip import Device, Engine, open_device
from backend_hip.runtimes import RuntimeInfo, select_runtime
from fixtures.registry import model_names, published_files, resolve_model
from fixtures.tiny import TINY
from reference.model import Model, load_model
from reference.model.errors import AssayError
from suites.options import (
    DEFAULT_MODELS,
    DEVICE_KIND,
    SELECTION,
    add_options,
    read_selection,
)

pytest_plugins = ["suites.benchmark.plugin"]

RUNTIME = pytest.StashKey[RuntimeInfo | str]()  # the text says why there is none
RAN = pytest.StashKey[int]()
IDLE_ENGINES = 8

LoadModel = Callable[[str], Model]


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser.getgroup("assay", "Assay").addoption)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[SELECTION] = read_selection(config.getoption)
    config.stash[DEVICE_KIND] = None
    config.stash[RAN] = 0
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
    config.stash[RUNTIME] = runtime
    config.stash[DEVICE_KIND] = runtime.kind


def _require_models(names: tuple[str, ...]) -> None:
    """Refuses a mistyped model before anything is collected; builds nothing."""
    for name in names:
        try:
            missing = name not in model_names() and not resolve_model(name).is_file()
        except AssayError as error:
            raise pytest.UsageError(f"--model: {error}") from None
        if missing:
            raise pytest.UsageError(f"--model: {name} is no file, expected a GGUF file")


def pytest_report_header(config: pytest.Config) -> list[str]:
    runtime = config.stash[RUNTIME]
    models = ", ".join(config.stash[SELECTION].model or DEFAULT_MODELS)
    if isinstance(runtime, str):
        return [f"assay: no runtime, tests that need a device do not run ({runtime})"]
    label = "emulated" if runtime.kind == "cpu" else runtime.kind
    return [
        f"assay: runtime {runtime.kind} ({label}), compiler {runtime.compiler}, models {models}"
    ]


# --- what is run --------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_name" not in metafunc.fixturenames:
        return
    explicit = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if not any("model_name" in names for names in explicit):
        chosen = metafunc.config.stash[SELECTION].model or DEFAULT_MODELS
        metafunc.parametrize("model_name", chosen)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selection = config.stash[SELECTION]
    cases = [_parameters(item) for item in items]
    unmatched = selection.unmatched(cases)
    if unmatched:
        raise pytest.UsageError(f"no collected test has {', '.join(unmatched)}")
    dropped = [item for item, case in zip(items, cases, strict=True) if not selection.keeps(case)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]


def _parameters(item: pytest.Item) -> dict[str, Any]:
    call = getattr(item, "callspec", None)
    return {} if call is None else call.params


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and item.config.stash[DEVICE_KIND] in ("cpu", None):
        _without_device(item.config, "needs a GPU, and this run has none")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # A test that got its device may still skip itself, for what only the CPU runtime checks.
    without_device = report.when == "setup" and "device" in getattr(item, "fixturenames", ())
    about_device = without_device or item.get_closest_marker("gpu") is not None
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and about_device and item.config.getoption("--require-gpu"):
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
        yield opened


@pytest.fixture(scope="session")
def load() -> LoadModel:
    """Model by registry name or path."""
    return cache(lambda name: load_model(resolve_model(name)))


@pytest.fixture(scope="session")
def tiny_model(load: LoadModel) -> LoadModel:
    """Model by the name of a tiny one."""

    def tiny(name: str) -> Model:
        assert name in TINY, f"{name} is no tiny model"
        return load(name)

    return tiny


@pytest.fixture(scope="session")
def real_model(load: LoadModel) -> LoadModel:
    """Published model by name. Skips where its package is not installed, and fails there in CI."""

    def real(name: str) -> Model:
        row = published_files()[name]
        if find_spec(row.module) is None:
            reason = f"{name} is not installed: pip install {row.requires}"
            if _in_ci():
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)
        return load(name)

    return real


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
