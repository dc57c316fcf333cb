"""Device files, and what is said where there is no GPU."""

from __future__ import annotations

import json

import pytest

from plancache import Device, PlanCache, graphs
from plancache.environment import LIMITS, REQUIRED, Here, Libraries, build_id, result_changing_variables
from plancache.errors import DeviceError, DeviceFileError


def written(path, **changes):
    device = Device.from_file("h200")
    path.write_text(json.dumps({"cudnn_version": 91900, "properties": dict(device.properties)} | changes))
    return path


def test_a_device_file_round_trips_and_bare_properties_are_read_too(tmp_path, device):
    """What `to_json` writes reads back the same; properties without a version are taken as of any cuDNN."""
    path = tmp_path / "device.json"
    path.write_text(device.to_json())
    assert Device.from_file(path) == device
    assert (device.model, device.sm_version, device.driver_version, device.is_file) == ("NVIDIA H200", 90, 13000, True)
    path.write_text(device.properties_json)
    assert Device.from_file(path).cudnn_version is None


@pytest.mark.parametrize("name", REQUIRED)
def test_a_device_file_with_a_missing_field_is_refused(tmp_path, device, name):
    """Each property that a key or cuDNN needs is asked for by name."""
    properties = {key: value for key, value in device.properties.items() if key != name}
    path = written(tmp_path / "device.json", properties=properties)
    with pytest.raises(DeviceFileError, match=f"lacks {name}.*--write-device"):
        Device.from_file(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not JSON"), ("[]", "lacks"), ("3", "lacks"), ('{"properties": 3}', "lacks"), ("\x00\xff", "not JSON|not text")],
)
def test_a_device_file_of_anything_else_is_refused(tmp_path, text, says):
    """Garbage is a clear error that names the file and how to write one."""
    path = tmp_path / "device.json"
    path.write_text(text)
    with pytest.raises(DeviceFileError, match=says):
        Device.from_file(path)


def test_a_device_file_that_is_not_there_is_refused(tmp_path):
    """A missing file is an error that lists the files that the package ships."""
    with pytest.raises(DeviceFileError, match="the package ships h200"):
        Device.from_file(tmp_path / "nowhere.json")
    with pytest.raises(DeviceFileError, match="the package ships h200"):
        Device.from_file("b300")


def test_a_device_file_of_another_cudnn_is_refused_when_it_is_used(tmp_path, cache_dir):
    """A file from another cuDNN than the one loaded names both versions and both cures."""
    device = Device.from_file(written(tmp_path / "device.json", cudnn_version=92801))
    example = graphs.conv_bias_relu(batch=1, in_channels=32, out_channels=32, height=14, width=14)
    with PlanCache(cache_dir, device=device) as cache, pytest.raises(DeviceFileError, match=r"9\.28\.1.*9\.19\.0.*--write-device"):
        cache.plan(example.graph)
    with pytest.raises(DeviceFileError, match="whole number"):
        Device.from_file(written(tmp_path / "device.json", cudnn_version="9.19"))


def test_properties_that_cudnn_refuses_are_an_error_with_the_cure(tmp_path, cache_dir, device):
    """A property that cuDNN wants and the file lacks is reported as the file's fault."""
    properties = {name: device.properties[name] for name in REQUIRED}
    lean = Device.from_file(written(tmp_path / "device.json", properties=properties))
    example = graphs.conv_bias_relu(batch=1, in_channels=32, out_channels=32, height=14, width=14)
    with PlanCache(cache_dir, device=lean, strict=True) as cache, pytest.raises(DeviceFileError, match="refuses the device's properties"):
        cache.plan(example.graph)


def test_without_a_gpu_the_error_names_the_cure(cache_dir):
    """Planning without a device on a machine that has none says how to plan for a device file."""
    try:
        Device.current()
    except DeviceError as error:
        assert "Device.from_file" in str(error)
    else:
        pytest.skip("this machine has a GPU")
    with PlanCache(cache_dir) as cache, pytest.raises(DeviceError, match=r"Device\.from_file"):
        cache.plan(graphs.conv_bias_relu(batch=1, in_channels=32, out_channels=32, height=14, width=14).graph)


def test_a_device_is_described_by_what_keys_hold(device, backend):
    """cuDNN's property object of the same device is recognised; one that differs in a limit is not."""
    import cudnn

    assert device.is_described_by(backend.properties())
    other = Device({**device.properties, "multiProcessorCount": 114}, device.cudnn_version)
    assert not device.is_described_by(cudnn.create_device_properties(other.properties_json))
    assert not device.is_described_by(object())
    assert set(LIMITS) < set(device.properties)


def test_the_build_ids_of_cudnns_libraries_are_found():
    """Every library of the loaded cuDNN has a build id, read from its ELF notes."""
    libraries = Libraries.loaded()
    assert libraries.unknown is None
    assert {"libcudnn", "libcudnn_graph", "libcudnn_ops"} <= set(libraries.cudnn)
    assert all(len(library.build_id) == 40 for library in libraries.cudnn.values())
    assert build_id(__file__) is None
    assert build_id("/nowhere") is None


def test_what_an_entry_can_require_is_found_out_when_asked():
    """The host architecture and packages are known; a thing that is not there is None."""
    here = Here(Libraries.loaded())
    assert here["machine"]
    assert here["no such thing"] is None
    assert set(here) == set(Here.NAMES)
    assert len(here) == len(Here.NAMES)


def test_logs_and_places_do_not_change_results():
    """Variables that can change results are read, those that say where to log or look are not."""
    environ = {
        "NVIDIA_TF32_OVERRIDE": "0",
        "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "CUBLASLT_DISABLE_TENSORCORES": "1",
        "FROST_X": "1",
        "CUDNN_LOGINFO_DBG": "1",
        "CUDNN_LOGDEST_DBG": "stderr",
        "CUDNN_PATH": "/usr",
        "CUBLASLT_LOG_LEVEL": "5",
        "CUTE_DSL_CACHE_DIR": "/tmp",
        "HOME": "/root",
    }
    assert list(result_changing_variables(environ)) == [
        "CUBLASLT_DISABLE_TENSORCORES",
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT",
        "FROST_X",
        "NVIDIA_TF32_OVERRIDE",
    ]
