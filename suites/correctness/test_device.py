"""What hip-python accepts in silence, and the device layer does not."""

import numpy as np
import pytest

from backend_hip.compile import KERNEL_FOLDER, KernelSource, build, flatten
from backend_hip.device import Buffer, Device, Event, Kernel, Module, PinnedArray, open_device
from reference.model.errors import DeviceError, InputError

ADD = KernelSource("arithmetic.hip", (("SIMT_BLOCK", 128), ("SIMT_WAVE", 32)))


def _kernel(device: Device, signature: str = "PPPi", entry: str = "add") -> Kernel:
    code = build(device, [ADD])[ADD]
    return Kernel(Module(code, "arithmetic"), entry, signature, 128)


def _buffer(device: Device, array: np.ndarray) -> Buffer:
    buffer = Buffer(device, array.nbytes, "test")
    buffer.upload(array)
    return buffer


def test_upload_and_download_round_trip_at_offsets(device: Device) -> None:
    array = np.arange(100, dtype=np.int32)
    buffer = _buffer(device, array)
    assert np.array_equal(buffer.download((100,), np.int32), array)
    assert np.array_equal(buffer.download((3,), np.int32, 4 * 97), array[97:])
    buffer.upload(np.array([-5], dtype=np.int32), 4 * 99)
    assert buffer.download((1,), np.int32, 4 * 99)[0] == -5
    buffer.free()


def test_new_memory_is_poison_on_the_checking_runtime(device: Device) -> None:
    buffer = Buffer(device, 64, "test")
    buffer.poison()
    assert np.isnan(buffer.download((16,), np.float32)).all()
    buffer.upload(np.zeros(16, dtype=np.float32))
    buffer.poison(32)
    values = buffer.download((16,), np.float32)
    assert (values[:8] == 0).all()
    assert np.isnan(values[8:]).all()
    buffer.free()


def test_copies_outside_a_buffer_are_refused(device: Device) -> None:
    buffer = Buffer(device, 16, "test")
    for offset, count in ((0, 5), (16, 1), (-4, 1), (13, 1)):
        with pytest.raises(InputError, match="are outside test of 16 bytes"):
            buffer.upload(np.zeros(count, dtype=np.float32), offset)
        with pytest.raises(InputError, match="are outside test of 16 bytes"):
            buffer.download((count,), np.float32, offset)
    with pytest.raises(InputError, match="offset 16 is outside"):
        buffer.at(16)
    with pytest.raises(InputError, match="0 bytes, expected at least 1"):
        Buffer(device, 0, "test")
    buffer.free()


def test_a_transposed_array_is_not_uploaded_as_its_base(device: Device) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffer = Buffer(device, array.nbytes, "test")
    with pytest.raises(InputError, match="C-contiguous"):
        buffer.upload(array.T)
    buffer.free()


def test_more_memory_than_the_device_has_is_one_clear_line(device: Device) -> None:
    with pytest.raises(InputError, match="do not fit in the memory of") as caught:
        Buffer(device, 1 << 60, "test")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (0, np.zeros(4, dtype=np.float32), "expected a Buffer or DevicePointer"),
        (0, 4096, "expected a Buffer or DevicePointer"),
        (0, None, "expected a Buffer or DevicePointer"),
        (3, np.int32(4), "expected an int"),
        (3, 4.0, "expected an int"),
        (3, True, "expected an int"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_kernel_arguments_of_another_kind_are_refused(
    place: int, value: object, expected: str, device: Device
) -> None:
    kernel = _kernel(device)
    buffer = _buffer(device, np.ones(4, dtype=np.float32))
    arguments: list[object] = [buffer, buffer, buffer, 4]
    arguments[place] = value
    with pytest.raises(ValueError, match=expected):
        kernel.launch(device.stream, (1, 1), *arguments)
    with pytest.raises(ValueError, match="got 3 arguments, expected 4"):
        kernel.launch(device.stream, (1, 1), buffer, buffer, buffer)
    buffer.free()


def test_a_signature_that_the_kernel_does_not_have_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="signature letter d"):
        _kernel(device, "PPPd")
    if device.runtime.kind == "amd":
        pytest.skip("ROCm does not check the size of the argument buffer at launch")
    kernel = _kernel(device, "PPP")
    buffer = _buffer(device, np.ones(4, dtype=np.float32))
    with pytest.raises(DeviceError, match="add"):
        kernel.launch(device.stream, (1, 1), buffer, buffer, buffer)
    buffer.free()


def test_a_missing_entry_and_a_foreign_code_object_are_refused(device: Device) -> None:
    with pytest.raises(DeviceError, match=r"no_such_kernel\): hipErrorNotFound"):
        _kernel(device, entry="no_such_kernel")
    with pytest.raises(DeviceError, match="hipModuleLoadData"):
        Module(b"\x7fELF" + bytes(200), "foreign")


def test_a_failed_compile_carries_the_log(device: Device) -> None:
    with pytest.raises(DeviceError, match="no_such_thing"):
        device.compile("int x = no_such_thing;", "broken.hip", ["-std=c++17"])


def test_flattening_includes_each_header_once() -> None:
    for path in KERNEL_FOLDER.glob("*.hip"):
        text = flatten(path.name)
        assert "#include" not in text.replace("//", "")
        assert text.count('#line 1 "simt.h"') == 1


def test_a_changed_header_changes_the_cache_key(device: Device, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for path in KERNEL_FOLDER.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    before = flatten("matvec.hip", tmp_path)
    header = tmp_path / "dot.h"
    header.write_text(header.read_text().replace("0.0f", "1.0f", 1))
    assert flatten("matvec.hip", tmp_path) != before


def test_pinned_memory_is_seen_by_captured_copies(device: Device) -> None:
    pinned = PinnedArray((4,), np.int32, "test")
    buffer = Buffer(device, pinned.nbytes, "test")
    with device.stream.capture() as captured:
        device.stream.copy(buffer.address, pinned.address, pinned.nbytes, to_device=True)
    graph = captured[0]
    for round_number in (1, 2):
        pinned.array[:] = round_number
        graph.launch(device.stream)
        assert (buffer.download((4,), np.int32) == round_number).all()
    graph.free()
    buffer.free()
    pinned.free()


def test_events_measure_time_in_order(device: Device) -> None:
    start, end = Event(), Event()
    start.record(device.stream)
    end.record(device.stream)
    end.synchronise()
    assert start.elapsed_us(end) >= 0
    start.free()
    end.free()


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(InputError, match="npu"):
        open_device("npu")
