"""The manifest: signatures as a text without loss, bad text named by line, and files that two processes share."""

from __future__ import annotations

import json
import os
import re
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from changes import nested
from faking import finish, start
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import matmul, scaled
from zoo import ZOO

from plancache import Constraints
from plancache.description import decode, signature_of
from plancache.encoding import Reader, encode
from plancache.entry import Candidate
from plancache.environment import Device
from plancache.errors import ManifestError
from plancache.jsonform import read as read_value
from plancache.jsonform import write as write_value
from plancache.manifest import VERSION, Manifest, Wanted
from plancache.signature import Uncacheable, read

cudnn = pytest.importorskip("cudnn")
DEVICE = Device.from_file("h200")


def wanted(graph: Any = None, **more: Any) -> Wanted:
    return Wanted(read(matmul() if graph is None else graph, DEVICE).signature, **more)


def some() -> Manifest:
    """Three graphs, one of them twice under other constraints."""
    limited = Constraints(workspace_limit_bytes=0, barred_engines=("eng4", "eng1"), deterministic=True)
    recipe = Candidate("eng7_k24=21", 7, {"TILE": 21})
    return Manifest.of([wanted(recipe=recipe), wanted(constraints=limited, build_s=0.25), wanted(scaled(1.5), count=3), wanted(scaled(1))])


# ---- without loss ---------------------------------------------------------------------------------------------------


def readable() -> dict[str, Wanted]:
    """The graphs of the zoo that have a signature."""
    found = {}
    for name, case in ZOO.items():
        with suppress(Uncacheable):
            found[name] = wanted(case.make())
    return found


def test_every_graph_of_the_zoo_comes_back_byte_by_byte() -> None:
    """Signature -> description -> signature, and signature -> text -> signature, with the same description."""
    graphs = readable()
    assert len(graphs) > 300
    for name, one in graphs.items():
        assert signature_of(decode(one.signature)) == one.signature, name
        (again,) = Manifest.parse(Manifest.of([one]).text(), "x")
        assert again.signature == one.signature, name
        assert repr(again.description) == repr(decode(one.signature)), name  # nan is not equal to itself


def test_the_whole_zoo_fits_into_one_manifest() -> None:
    """Graphs that come to the same signature are one, asked for several times."""
    graphs = readable().values()
    again = Manifest.parse(Manifest.of(graphs).text(), "x")
    assert {one.signature for one in again} == {one.signature for one in graphs}
    assert sum(one.count for one in again) == len(graphs)


@settings(deadline=None, max_examples=400)
@given(nested())
@example([1, 1.0, True, -0.0, 0.0, float("nan"), float("inf"), -float("inf"), None, "", "1", (1,), [1]])
@example({"tuple": [1], "enum": "data_type.HALF", "a": {"float": "nan"}})
@example([slice(None, 1, 2), cudnn.data_type.HALF, 5e-324, 0.1, 10**40])
def test_a_value_comes_back_with_its_type_and_all_its_bits(value: Any) -> None:
    """Through JSON's text: bools, ints and floats are never confused, nor tuples, lists, slices, enums and texts."""
    decoded = Reader(encode(value)).value()
    found = json.loads(json.dumps(write_value(decoded)), parse_constant=pytest.fail)  # NaN is Python's own, other programs refuse it
    assert encode(read_value(found)) == encode(value)


@settings(deadline=None, max_examples=100)
@given(value=nested(), kind=st.one_of(st.none(), st.just("HALF"), nested()))
@example(value=1, kind="HALF")
@example(value=True, kind=1)
@example(value=1.0, kind=None)
@example(value=0, kind=cudnn.data_type.HALF)
def test_any_value_in_any_field_of_a_signature_comes_back(value: Any, kind: Any) -> None:
    """Parameters, constants, and data types of another form than the usual."""
    description = decode(wanted().signature)
    tensor, node = {**description.tensors[0], **dict.fromkeys(_OF_TENSORS, value), "data_type": kind}, description.nodes[0]
    changed = type(description)(
        {**description.context, "io_data_type": kind},
        {**description.options, "sm_count": value},
        (tensor, *description.tensors[1:]),
        ({**node, "params": {"p": value}},),
    )
    (again,) = Manifest.parse(Manifest.of([Wanted(signature_of(changed))]).text(), "x")
    assert again.signature == signature_of(changed)


_OF_TENSORS = ("pass_by_value", "scalar_type", "dim_assigned", "is_virtual", "ragged_offset_multiplier", "alignment_value")


def test_all_that_is_known_of_a_graph_comes_back() -> None:
    """Constraints, counts, build seconds and recipes too; what was read is written the same."""
    manifest = some()
    again = Manifest.parse(manifest.text(), "x")
    assert again == manifest
    assert again.text() == manifest.text()
    assert Manifest.parse(Manifest().text(), "x") == Manifest()


# ---- for people -----------------------------------------------------------------------------------------------------


def test_a_person_can_read_and_diff_it() -> None:
    """One tensor a line, and a graph more is a block more: no line of the others changes but for a comma."""
    text = some().text()
    assert '    {"uid": 1, "data_type": "HALF", "dim": [8, 64, 32], "stride": [2048, 32, 1], "stride_assigned": false},\n' in text
    assert '   "graph": "matmul [8x64x32, 8x32x16] half",\n' in text
    more = some().merged(Manifest.of([wanted(scaled(7))])).text()
    lines = [line.rstrip(",") for line in more.splitlines()]
    missing = iter(lines)
    assert all(line.rstrip(",") in missing for line in text.splitlines())  # in this order, with others between them


def test_the_order_does_not_depend_on_who_asked_first() -> None:
    """The same graphs make the same text."""
    graphs = list(some())
    assert Manifest.of(reversed(graphs)).text() == Manifest.of(graphs).text()


def test_it_names_no_place_and_nobody(tmp_path: Path) -> None:
    """Path, host and user are not in what is written."""
    some().write(tmp_path / "m.json")
    text = (tmp_path / "m.json").read_text()
    assert not [word for word in (str(tmp_path), os.uname().nodename, str(Path.home())) if word in text]


# ---- bad input ------------------------------------------------------------------------------------------------------


def error_of(text: str) -> ManifestError:
    with pytest.raises(ManifestError) as caught:
        Manifest.parse(text, "serve.json")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("manifest serve.json")
    return caught.value


def line_of(text: str, part: str, which: int = 0) -> int:
    """The line, from 1, on which the block begins that holds the n-th occurrence of a part."""
    at = [found.start() for found in re.finditer(re.escape(part), text)][which]
    return text.count("\n", 0, text.rindex("  {\n", 0, at)) + 1


BAD_BLOCKS = {
    "a dim": ('"dim": [8, 64, 32]', '"dim": [8, 64, 33]', "does not match its sha256"),
    "an integer made a float": ('"dim": [8, 64, 32]', '"dim": [8, 64, 32.0]', "does not match its sha256"),
    "a digest": ('"sha256": "', '"sha256": "0', "does not match its sha256"),
    "a count": ('"count": 1', '"count": 1.5', "its count is 1.5"),
    "seconds": ('"build_s": 0.25', '"build_s": NaN', "its build_s is nan"),
    "a constraint": ('"deterministic": true', '"deterministic": 1', "deterministic must be True or False"),
    "a constraint's name": ('"deterministic"', '"determined"', "'determined', which this version does not know"),
    "a recipe": ('"engine": 7', '"engine": "7"', "its recipe is"),
    "a field's name": ('"stride_assigned"', '"strides_assigned"', "'strides_assigned', which this version does not know"),
    "no field": ('"node_type": "MATMUL", ', "", "it lacks 'node_type'"),
    "a tensor taken out": ('"uid": 1,', '"uid": 2,', "its tensor 1 has the uid 2"),
    "a form": ('{"enum": "scalar_type.RUNTIME_PARAM"}', '{"enum": 5}', "is garbled"),
}


@pytest.mark.parametrize(("old", "new", "said"), BAD_BLOCKS.values(), ids=BAD_BLOCKS)
def test_a_changed_block_is_named_by_its_line(old: str, new: str, said: str) -> None:
    """The error says which graph, on which line, and what to do."""
    text = some().text()
    error = error_of(text.replace(old, new, 1))
    assert error.line == line_of(text, old)
    assert said in str(error)
    assert str(error).endswith("undo the change, or move the file away and record it again (plancache record, PlanCache.record)")


def test_a_graph_that_is_there_twice_is_named() -> None:
    """As a merge of two branches makes it: both lines are told."""
    text = some().text()
    first, second = text.index("  {\n"), text.index("  },\n") + 5
    error = error_of(text[:second] + text[first:second] + text[second:])
    assert error.line == text.count("\n", 0, second) + 1
    assert f"is a duplicate: it is there already, from line {text.count(chr(10), 0, first) + 1} on; take one" in str(error)


def test_a_truncated_text_is_refused_wherever_it_ends() -> None:
    """None of its beginnings is a manifest; with fewer graphs it would warm too little."""
    text = some().text().rstrip()
    for end in range(0, len(text), 7):
        error_of(text[:end])
    error = error_of(text[: len(text) // 2])
    assert error.line == text.count("\n", 0, len(text) // 2) + 1


OTHERS = {
    "garbage": ("<<<<<<< HEAD\n", "cut off or garbled"),
    "other JSON": ('{"a": 1}', "no manifest"),
    "a list": ("[]", "no manifest"),
    "another version": (Manifest().text().replace(f'"plancache_manifest": {VERSION}', '"plancache_manifest": 9'), "manifest version is 9"),
    "other signatures": (Manifest().text().replace('"signature_version": 1', '"signature_version": 2'), "signature version is 2"),
    "true for a version": (Manifest().text().replace(f'"plancache_manifest": {VERSION}', '"plancache_manifest": true'), "version is True"),
    "no graphs": (Manifest().text().replace('"graphs"', '"graph"'), "other parts than a list of graphs"),
    "two lists": (Manifest().text().replace('"graphs": []', '"graphs": [], "graphs": []'), "'graphs' stands twice"),
    "no block": (Manifest().text().replace("[]", "[5]"), "graph 1 is garbled: it is no block of fields"),
    "bottomless": ("[" * 100_000, "garbled"),
}


@pytest.mark.parametrize(("text", "said"), OTHERS.values(), ids=OTHERS)
def test_what_is_no_manifest_says_so(text: str, said: str) -> None:
    """One line with the reason, for every other file."""
    assert said in str(error_of(text))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_no_change_of_a_text_passes_for_another_signature(data: st.DataObject) -> None:
    """Whatever character is changed: it is an error, or the same signatures."""
    manifest = some()
    text = manifest.text()
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.sampled_from('0123456789.,:{}[]"aeflnrstu\n ')) + text[at + 1 :]
    try:
        found = Manifest.parse(changed, "x")
    except ManifestError:
        return
    assert [one.signature for one in found] == [one.signature for one in manifest]


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    """Not there, a folder, no text."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, said in (("none", "No such file"), (".", "Is a directory"), ("bytes", "it is no text")):
        with pytest.raises(ManifestError, match=said):
            Manifest.read(tmp_path / name)


# ---- files ----------------------------------------------------------------------------------------------------------


def test_merging_keeps_what_other_runs_recorded(tmp_path: Path) -> None:
    """Counts add, a later build time or recipe replaces an earlier one, and what the later run does not know stays."""
    file = tmp_path / "m.json"
    recipe, other = Candidate("eng7_k24=21", 7, {"TILE": 21}), Candidate("eng8", 8, {})
    Manifest.of([wanted(count=2, build_s=1.0, recipe=recipe), wanted(scaled(1))]).merge_into(file)
    whole = Manifest.of([wanted(count=3), wanted(scaled(2))]).merge_into(file)
    assert Manifest.read(file) == whole
    found = {one.signature: one for one in whole}
    assert len(found) == 3
    assert found[wanted().signature] == wanted(count=5, build_s=1.0, recipe=recipe)
    later = Manifest.of([wanted(build_s=2.0, recipe=other)]).merge_into(file)
    assert {one.signature: one for one in later}[wanted().signature] == wanted(count=6, build_s=2.0, recipe=other)


MERGE = """
    import sys
    from plancache.manifest import Manifest, Wanted
    from plancache.environment import Device
    from plancache.signature import read
    from samples import matmul, scaled
    import cudnn

    shared = Wanted(read(matmul(), Device.from_file("h200")).signature)
    own = Wanted(read(scaled(float(sys.argv[2])), Device.from_file("h200")).signature)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(15):
        Manifest.of([shared, own]).merge_into(sys.argv[1])
"""


def test_processes_that_merge_at_once_lose_nothing(tmp_path: Path) -> None:
    """Three write into one file together: every graph and every count is there at the end, and no temporary file."""
    file = tmp_path / "m.json"
    children = [start(MERGE, file, number) for number in range(3)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        finish(child)
    counts = sorted(one.count for one in Manifest.read(file))
    assert counts == [15, 15, 15, 45]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.json.lock", "m.json"]


def test_a_file_that_is_no_manifest_is_never_overwritten(tmp_path: Path) -> None:
    """Merging into a README leaves it as it is."""
    file = tmp_path / "README"
    file.write_text("hello")
    with pytest.raises(ManifestError):
        some().merge_into(file)
    assert file.read_text() == "hello"


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """A write that fails in its middle changes nothing and leaves nothing behind."""
    file = tmp_path / "m.json"
    Manifest.of([wanted()]).write(file)
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(ManifestError, match=r"cannot be written .File too large.; make room"):
            some().merge_into(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.json.lock", "m.json"]


def test_a_link_stays_a_link_and_a_mode_stays_a_mode(tmp_path: Path) -> None:
    """The file behind a link is replaced, with the permissions that it had; a new one has the user's usual ones."""
    real, link = tmp_path / "real.json", tmp_path / "m.json"
    link.symlink_to(real)
    some().merge_into(link)
    umask = os.umask(0)
    os.umask(umask)
    assert real.stat().st_mode & 0o777 == 0o666 & ~umask
    real.chmod(0o640)
    some().merge_into(link)
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert Manifest.read(link) == some().merged(some())
