"""Kernel faults on the CPU runtime: reported by name, sticky, and survived by the process."""

from dataclasses import dataclass

import pytest

from suites.correctness.cpu_driver import (
    in_child,
)


@dataclass(frozen=True)
class FaultCase:
    """A launch that must lose the device: the error, and what the report must name."""

    name: str
    launch: str
    error: str
    report: tuple[str, ...]


FAULTS = [
    FaultCase("exit-before-barrier", "launch(kernel('leave_before_barrier'), (1,1,1))",
              "hipErrorLaunchFailure",
              ("kernel leave_before_barrier (launch 2), block (0, 0, 0): thread 9 has returned",
               "block barrier")),
    FaultCase("exit-before-wave-sum", "launch(kernel('leave_before_sum'), (1,1,1), d)",
              "hipErrorLaunchFailure",
              ("kernel leave_before_sum", "thread 9 has returned", "waits in wave_sum")),
    FaultCase("barrier-against-wave-sum", "launch(kernel('two_meetings'), (1,1,1), d)",
              "hipErrorLaunchFailure",
              ("kernel two_meetings", "thread 9 waits at a block barrier", "waits in wave_sum")),
    FaultCase("wave-leaves", "launch(kernel('one_wave_leaves'), (1,1,1))", "hipErrorLaunchFailure",
              ("kernel one_wave_leaves", "thread 63 has returned", "thread 0", "block barrier")),
    FaultCase("too-many-columns", "launch(kernel('too_many_columns'), (1,1,1), d)",
              "hipErrorLaunchFailure", ("kernel too_many_columns", "columns")),
    FaultCase("too-much-shared", "launch(kernel('much_shared'), (1,1,1), d)",
              "hipErrorLaunchOutOfResources", ("kernel much_shared", "65540 bytes", "65536")),
    FaultCase("shared-overrun", "launch(kernel('shared_overrun'), (1,1,1), d)",
              "hipErrorIllegalAddress", ("kernel shared_overrun", "shared array number 0")),
    FaultCase("write-past-end", "launch(kernel('write_at'), (3,1,1), d, ctypes.c_int64(256))",
              "hipErrorIllegalAddress",
              ("kernel write_at (launch 2), block (1, 0, 0), thread 5", "0 bytes past the end")),
    FaultCase("write-16-past-odd-end",
              "e = device_memory(250); launch(kernel('write_at'), (3,1,1), e, ctypes.c_int64(266))",
              "hipErrorIllegalAddress", ("kernel write_at", "16 bytes past the end", "250 bytes")),
    FaultCase("write-before", "launch(kernel('write_at'), (3,1,1), d, ctypes.c_int64(-4096))",
              "hipErrorIllegalAddress", ("kernel write_at", "4096 bytes before")),
    FaultCase("null", "launch(kernel('write_at'), (3,1,1), ctypes.c_void_p(0), ctypes.c_int64(0))",
              "hipErrorIllegalAddress", ("kernel write_at", "thread 5", "0x0")),
    FaultCase("slack-checked-at-free",
              "e = device_memory(250); "
              "launch(kernel('write_at'), (3,1,1), e, ctypes.c_int64(251)); call(hip.hipFree(e))",
              "hipErrorIllegalAddress", ("hipFree", "1 bytes past the end", "250 bytes")),
    FaultCase("stack-overflow", "launch(kernel('deep'), (1,1,1), d, ctypes.c_int32(100))",
              "hipErrorIllegalAddress", ("kernel deep", "thread 0", "stack overflow")),
]  # fmt: skip


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.name)
def test_fault_is_reported_and_sticks(case: FaultCase) -> None:
    child = in_child(
        f"""
import faulthandler; faulthandler.enable()
d = device_memory(256)
launch(kernel('deep'), (1,1,1), d, ctypes.c_int32(8))
print(name_of(lambda: [None, exec({case.launch!r}, globals())]))
print(name_of(lambda: call(hip.hipMalloc(16))))
print(hip.hipGetErrorString(hip.hipGetLastError()[0])[1])
"""
    )
    assert child.returncode == 0, child.stderr
    first, later, text = child.stdout.splitlines()
    assert (first, later) == (case.error, case.error), child.stderr
    for part in case.report:
        assert part in child.stderr
        assert part in text
    assert "Fatal Python error" not in child.stderr


def test_a_fault_outside_a_launch_still_reaches_faulthandler() -> None:
    child = in_child(
        """
import faulthandler; faulthandler.enable()
launch(kernel('position'), (1,1,1), device_memory(256))
ctypes.string_at(8)
"""
    )
    assert child.returncode < 0
    assert "Fatal Python error: Segmentation fault" in child.stderr


def test_a_forked_child_gets_its_own_threads() -> None:
    child = in_child(
        """
n = 400_000
a = upload(np.ones(n, np.float32)); out = device_memory(4 * n)
def work():
    for _ in range(3):
        launch(kernel('add'), (n // BLOCK, 1, 1), a, a, out, ctypes.c_int32(n))
    return bool((download(out, n, np.float32) == 2).all())
assert work()
pid = os.fork()
if pid == 0:
    os._exit(0 if work() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), work())
""",
        ASSAY_CPU_THREADS="4",
    )
    assert child.stdout.split() == ["0", "True"], child.stderr
