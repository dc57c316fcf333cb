"""The key: each thing that it should depend on changes it and is named, nothing else does; bad constraints are refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plancache.environment import LIMITS, Device, Libraries, Library, result_changing_variables
from plancache.errors import SettingsError
from plancache.key import COMPONENTS, Constraints, Place, PlanKey, make_key

DEVICE = Device.from_file("h200")
BUILDS = ("libcudnn", "libcudnn_graph", "libcudnn_ops")
LIBRARIES = Libraries(
    cudnn_version=91900,
    frontend_version="1.32.0",
    cudnn={name: Library(f"/lib/{name}.so.9", f"{index:040x}") for index, name in enumerate(BUILDS)},
    unknown=None,
)
NAMES = [field.name for field in fields(Constraints) if field.name.endswith(("engines", "notes"))]

DIGEST = "e8bf7992266bff1fe466ffc988ad3499142215dabcb279ad9cb182a7af491440"

components = st.lists(st.binary(max_size=8), min_size=len(COMPONENTS), max_size=len(COMPONENTS)).map(tuple)


def key(
    signature: bytes = b"signature",
    device: Device = DEVICE,
    libraries: Libraries = LIBRARIES,
    variables: dict[str, str] | None = None,
    constraints: Constraints | None = None,
) -> PlanKey:
    return make_key(signature, Place.of(device, libraries), variables or {}, constraints or Constraints())


def with_properties(**changes: Any) -> Device:
    return replace(DEVICE, properties={**DEVICE.properties, **changes})


def other(value: Any) -> Any:
    return [*value[:-1], value[-1] + 1] if isinstance(value, list) else value + 1 if isinstance(value, int) else f"{value} NVL"


def changed_components(mine: PlanKey, theirs: PlanKey) -> list[str]:
    assert (mine.digest == theirs.digest) == (mine == theirs)
    return [difference.component for difference in mine.difference(theirs)]


# ---- components -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(components, st.data())
def test_every_component_changes_the_digest_and_is_named(preimages: tuple[bytes, ...], data: st.DataObject) -> None:
    """Exactly the components that differ are named, with both preimages and digests; the key's digest differs with any."""
    wanted = data.draw(st.sets(st.integers(0, len(COMPONENTS) - 1)))
    mine = PlanKey(preimages)
    theirs = PlanKey(tuple(part + b"+" if index in wanted else part for index, part in enumerate(preimages)))
    assert changed_components(mine, theirs) == [COMPONENTS[index] for index in sorted(wanted)]
    for difference in mine.difference(theirs):
        assert (difference.mine, difference.theirs) == (mine.components[difference.component], theirs.components[difference.component])
        assert mine.component_digests[difference.component] != theirs.component_digests[difference.component]


@settings(deadline=None)
@given(components, st.integers(0, len(COMPONENTS) - 2), st.integers(1, 8), st.booleans())
def test_bytes_do_not_move_between_components_unnoticed(preimages: tuple[bytes, ...], at: int, count: int, forth: bool) -> None:
    """("ab", "c") is not ("a", "bc"): what moves to the neighbour changes the digest; so does exchanging two neighbours."""
    left, right = preimages[at : at + 2]
    moved = (left[:-count], left[-count:] + right) if forth else (left + right[:count], right[count:])
    for pair in (moved, (right, left)):
        if pair != (left, right):
            assert PlanKey((*preimages[:at], *pair, *preimages[at + 2 :])).digest != PlanKey(preimages).digest


def test_the_name_of_a_component_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes under another component's name are another key."""
    mine = PlanKey((b"same",) * len(COMPONENTS)).digest
    monkeypatch.setattr("plancache.key.COMPONENTS", ("renamed", *COMPONENTS[1:]))
    assert PlanKey((b"same",) * len(COMPONENTS)).digest != mine


def test_the_version_of_the_key_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another way of making keys is another key."""
    mine = key().digest
    monkeypatch.setattr("plancache.key.KEY_VERSION", 2)
    assert key().digest != mine


@pytest.mark.parametrize("count", [0, len(COMPONENTS) - 1, len(COMPONENTS) + 1])
def test_a_key_has_all_components_and_no_more(count: int) -> None:
    """A missing component is an error, not an empty one."""
    with pytest.raises(ValueError):
        _ = PlanKey((b"",) * count).digest


def test_a_digest_is_the_same_in_every_process() -> None:
    """The digest of given components is fixed: a change of how keys are made must come with another KEY_VERSION."""
    assert PlanKey(tuple(name.encode() for name in COMPONENTS)).hex == DIGEST


# ---- environment ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "component"), [*((name, "device") for name in LIMITS), ("deviceName", "model"), ("driverVer", "driver")])
def test_what_cudnn_checks_of_a_device_changes_the_key(name: str, component: str) -> None:
    """Each device limit, the model and the driver version has its component."""
    assert changed_components(key(), key(device=with_properties(**{name: other(DEVICE.properties[name])}))) == [component]


def test_what_cudnn_does_not_check_of_a_device_does_not_count() -> None:
    """Memory size, clocks, PCI id, L2 size and all other properties are not in the key; nor is where the file came from."""
    rest = DEVICE.properties.keys() - {*LIMITS, "deviceName", "driverVer"}
    assert {"totalGlobalMem", "smClockRateKHz", "memClockRateKHz", "pciDeviceId", "l2CacheSize", "cudaDeviceId"} <= rest
    for name in rest:
        assert key(device=with_properties(**{name: other(DEVICE.properties[name])})) == key()
    assert key(device=replace(DEVICE, cudnn_version=None)) == key()


@pytest.mark.parametrize("ordinal", [0, 3])
def test_a_device_file_has_the_key_of_the_gpu_that_it_describes(ordinal: int) -> None:
    """A plan built for a device file is found on the GPU, whatever its index and the order of its properties."""
    gpu = Device(dict(reversed(DEVICE.properties.items())), 91900, ordinal)
    assert key(device=gpu).digest == key().digest


@pytest.mark.parametrize(
    ("libraries", "component"),
    [
        (LIBRARIES._replace(cudnn_version=91901), "cudnn"),
        (LIBRARIES._replace(frontend_version="1.32.1"), "frontend"),
        (LIBRARIES._replace(cudnn=dict(list(LIBRARIES.cudnn.items())[1:])), "cudnn"),
        *(
            (LIBRARIES._replace(cudnn={**LIBRARIES.cudnn, name: Library(library.path, "f" * 40)}), "cudnn")
            for name, library in LIBRARIES.cudnn.items()
        ),
    ],
)
def test_what_is_loaded_changes_the_key(libraries: Libraries, component: str) -> None:
    """cuDNN's version, the build id of each of its libraries, which there are, and the frontend's version count."""
    assert changed_components(key(), key(libraries=libraries)) == [component]


def test_where_a_library_lies_does_not_count() -> None:
    """A path is never in a key."""
    moved = {name: Library(f"/elsewhere/{name}", library.build_id) for name, library in LIBRARIES.cudnn.items()}
    assert key(libraries=LIBRARIES._replace(cudnn=moved)) == key()


def test_the_libraries_of_this_process_make_a_key() -> None:
    """Real facts fit: each libcudnn library of this process has a build id, and they are in the key."""
    pytest.importorskip("cudnn")
    libraries = Libraries.loaded()
    found = key(libraries=libraries).components["cudnn"].decode()
    assert libraries.unknown is None
    assert all(library.build_id and library.build_id in found for library in libraries.cudnn.values())
    assert len(libraries.cudnn) > 5


RESULT_CHANGING = (
    "NVIDIA_TF32_OVERRIDE", "CUDNN_FRONTEND_ENABLE_X", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_HEURISTICS_CACHE_CAPACITY",
    "CUTE_DSL_ENABLE_TVM_FFI", "FROST_ENABLE_ENGINES", "CUDNN_LOGIC", "CUDNN_DIRECT",
)  # fmt: skip
LOGS_AND_PLACES = (
    "CUDNN_LOGINFO_DBG", "CUDNN_LOGDEST_DBG", "CUDNN_LOGLEVEL_DBG", "CUDNN_FRONTEND_LOG_INFO", "CUDNN_FRONTEND_LOG_FILE",
    "CUBLAS_LOGINFO_DBG", "CUBLAS_LOGDEST_DBG", "CUBLASLT_LOG_LEVEL", "CUBLASLT_LOG_FILE", "CUDNN_PATH", "CUDNN_HOME",
    "CUTE_DSL_CACHE_DIR", "CUDNN_ROOT", "CUDNN_LOG", "CUDNN_LOGS", "CUDNN_LOGERR_DBG", "CUDNN_LOGWARN_DBG", "FROST_LOGGING",
    "CUTE_DSL_LOG_FOLDER", "CUTE_DSL_DUMP_FOLDER", "FROST_FILE", "PATH", "HOME", "NVIDIA_VISIBLE_DEVICES", "FOO", "MY_CUDNN_OPTION",
)  # fmt: skip


@pytest.mark.parametrize("name", RESULT_CHANGING)
def test_a_variable_that_changes_results_changes_the_key(name: str) -> None:
    """Set, unset and each of its values are different keys."""
    keys = [key(variables=result_changing_variables(environ)) for environ in ({}, {name: "0"}, {name: "1"}, {name: ""})]
    assert len({found.digest for found in keys}) == len(keys)
    assert changed_components(keys[0], keys[1]) == ["variables"]


def test_variables_for_logs_and_places_do_not_count() -> None:
    """Where logs go and where libraries lie is not in the key, nor is any variable of others."""
    assert key(variables=result_changing_variables(dict.fromkeys(LOGS_AND_PLACES, "1"))) == key()


def test_the_order_of_variables_does_not_count() -> None:
    """The environment is a mapping."""
    environ = dict.fromkeys(RESULT_CHANGING, "1")
    assert key(variables=environ) == key(variables=dict(reversed(environ.items())))


def test_variables_are_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set while the process runs counts from then on."""
    before = result_changing_variables()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0" if before.get("NVIDIA_TF32_OVERRIDE") != "0" else "1")
    assert result_changing_variables() != before


# ---- constraints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "constraints",
    [
        Constraints(workspace_limit_bytes=0),
        Constraints(workspace_limit_bytes=1 << 20),
        Constraints(deterministic=True),
        *(Constraints(**{name: ("eng7",)}) for name in NAMES),
        *(Constraints(**{name: ("eng7", "eng8")}) for name in NAMES),
    ],
)
def test_every_constraint_changes_the_key(constraints: Constraints) -> None:
    """What a caller forbids is part of what he asks for."""
    assert changed_components(key(), key(constraints=constraints)) == ["constraints"]


def test_no_two_constraints_share_a_key() -> None:
    """The same name under another constraint is another key."""
    keys = [key(constraints=Constraints(**{name: ("NAME",)})) for name in NAMES]
    assert len({found.digest for found in keys}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_names_does_not_count(name: str) -> None:
    """Names are a set: order and repetition do not count, nor what kind of collection holds them."""
    spellings: list[Iterable[str]] = [("a", "b"), ["b", "a"], {"a", "b"}, ("a", "b", "a"), (part for part in "ba")]
    made = [Constraints(**{name: spelling}) for spelling in spellings]
    assert [getattr(constraints, name) for constraints in made] == [("a", "b")] * len(spellings)
    assert {key(constraints=constraints).digest for constraints in made} == {key(constraints=made[0]).digest}


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", b"1"])
def test_a_workspace_limit_that_is_no_size_is_refused(value: Any) -> None:
    """The message says what a limit must be."""
    with pytest.raises(SettingsError, match="must be a whole number of bytes, 0 or more"):
        Constraints(workspace_limit_bytes=value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", ["eng7", b"eng7", (7,), (None,), 7, None, ("",)])
def test_names_that_are_none_are_refused(name: str, value: Any) -> None:
    """A bare text would be taken for its letters, an empty name for every name: the message says what must be given."""
    with pytest.raises(SettingsError, match=f"{name} must be a tuple of names"):
        Constraints(**{name: value})


@pytest.mark.parametrize("value", ["no", 0, 1, None])
def test_a_flag_that_is_none_is_refused(value: Any) -> None:
    """The text "no" would be taken for yes."""
    with pytest.raises(SettingsError, match="deterministic must be True or False"):
        Constraints(deterministic=value)
