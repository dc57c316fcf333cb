"""The manifest: the graphs that a program needs, as a text that people read, diff and commit.

JSON, one graph a block, one tensor and one operation a line, in an order that does not depend on who asked first. A
signature is in it without loss: floats with all their bits, every value with its type; its digest tells whether somebody
changed it. Nothing in it names a path, a host or a user.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from plancache.description import Description, decode, signature_of
from plancache.entry import MALFORMED, Candidate
from plancache.errors import ManifestError
from plancache.jsonform import PARTS, description_of, refuse_unknown, written
from plancache.key import Constraints
from plancache.lazy import lazy
from plancache.signature import VERSION as SIGNATURE_VERSION

VERSION = 1

_UNCONSTRAINED = Constraints()
_LOCK_TIMEOUT_S = 60.0  # merging takes milliseconds
_RECORD = "record it again (plancache record, PlanCache.record)"
_MAKE = "plancache record and PlanCache.record make one"
_MEND = f"undo the change, or move the file away and {_RECORD}"


@dataclass(frozen=True)
class Wanted:
    """A graph that a program needs, under the constraints that it was asked for with.

    `count`: how often it was asked for. `build_s`: seconds that its build took, where that is known. `recipe`: the engine
    configuration that it is to have, where that is laid down.
    """

    signature: bytes = field(repr=False)
    constraints: Constraints = field(default_factory=Constraints)
    count: int = 1
    build_s: float | None = None
    recipe: Candidate | None = None

    @lazy
    def digest(self) -> str:
        """SHA-256 of the signature, as hex."""
        return hashlib.sha256(self.signature).hexdigest()

    @lazy
    def description(self) -> Description:
        return decode(self.signature)

    @property
    def summary(self) -> str:
        """The graph in one line."""
        return self.description.summary

    @property
    def identity(self) -> tuple[bytes, Constraints]:
        """What makes it another graph than the others of a manifest."""
        return self.signature, self.constraints

    def and_again(self, later: Wanted) -> Wanted:
        """The same graph, recorded once more: counts add, and the later run knows better."""
        build_s = self.build_s if later.build_s is None else later.build_s
        return replace(self, count=self.count + later.count, build_s=build_s, recipe=later.recipe or self.recipe)


@dataclass(frozen=True)
class Manifest:
    """The graphs that a program needs, each once, in the order of their summaries."""

    graphs: tuple[Wanted, ...] = ()

    @classmethod
    def of(cls, graphs: Iterable[Wanted]) -> Manifest:
        """A manifest of graphs in any order; what is there twice is one, with both counts."""
        by_identity: dict[tuple[bytes, Constraints], Wanted] = {}
        for wanted in graphs:
            known = by_identity.get(wanted.identity)
            by_identity[wanted.identity] = wanted if known is None else known.and_again(wanted)
        return cls(_in_order(by_identity.values()))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Manifest:
        """The manifest in a file. Raises `ManifestError`."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ManifestError(str(path), None, f"it cannot be read ({error.strerror})", _MAKE) from None
        except ValueError:  # bytes that are no UTF-8, a zero in the path
            raise ManifestError(str(path), None, "it is no text", _MEND) from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, path: str) -> Manifest:
        """The manifest that a text is; `path` is for errors. Raises `ManifestError`."""
        return cls(_in_order(_parsed(text, path)))

    def merged(self, later: Manifest) -> Manifest:
        """Both: counts add; where both know build seconds or a recipe, the later one's stay."""
        return Manifest.of((*self.graphs, *later.graphs))

    def text(self) -> str:
        """The text of a file."""
        blocks = ",\n".join("  {\n" + _block(wanted) + "\n  }" for wanted in self.graphs)
        graphs = f"[\n{blocks}\n ]" if blocks else "[]"
        return f'{{\n "plancache_manifest": {VERSION},\n "signature_version": {SIGNATURE_VERSION},\n "graphs": {graphs}\n}}\n'

    def write(self, path: str | os.PathLike[str]) -> None:
        """Puts this manifest into a file, whole or not at all. Raises `ManifestError`."""
        real = Path(os.path.realpath(path))  # a link stays one
        try:
            _replace(real, self.text().encode())
        except OSError as error:
            cure = "make room, or name a place that can be written"
            raise ManifestError(str(path), None, f"it cannot be written ({error.strerror})", cure) from error

    def merge_into(self, path: str | os.PathLike[str]) -> Manifest:
        """Adds this manifest to what the file holds, and returns the sum; of two processes at once neither is lost.

        Raises `ManifestError`, and leaves a file that is none as it is.
        """
        with _locked(Path(os.path.realpath(path)), str(path)):
            whole = Manifest.read(path).merged(self) if Path(path).exists() else self
            whole.write(path)
            return whole

    def __iter__(self) -> Iterator[Wanted]:
        return iter(self.graphs)

    def __len__(self) -> int:
        return len(self.graphs)


def _in_order(graphs: Iterable[Wanted]) -> tuple[Wanted, ...]:
    return tuple(sorted(graphs, key=lambda one: (one.summary, one.digest, one.constraints.encoded)))


# ---- the file -------------------------------------------------------------------------------------------------------


def _replace(real: Path, data: bytes) -> None:
    made = real.with_name(f".{real.name}.{os.getpid()}-{os.urandom(4).hex()}")
    descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            with suppress(FileNotFoundError):
                os.fchmod(descriptor, stat.S_IMODE(real.stat().st_mode))
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        made.replace(real)
    except BaseException:
        made.unlink(missing_ok=True)
        raise


@contextmanager
def _locked(real: Path, path: str) -> Iterator[None]:
    """Holds the lock that all who merge into a file share, where there can be one."""
    from filelock import FileLock, Timeout

    file = real.with_name(f".{real.name}.lock")
    lock = FileLock(file, timeout=_LOCK_TIMEOUT_S, thread_local=False, poll_interval=0.01)
    try:
        lock.acquire()
    except Timeout:
        reason = f"another process has held {file} for {_LOCK_TIMEOUT_S:.0f} s"
        raise ManifestError(path, None, reason, "end that one, and try again") from None
    except (OSError, NotImplementedError):  # no locks there: as if alone; where nothing can be written, the write says so
        yield
        return
    try:
        yield
    finally:
        lock.release()


# ---- text -> graphs -------------------------------------------------------------------------------------------------


def _parsed(text: str, path: str) -> list[Wanted]:
    try:
        doubtful = len(re.findall(r'"graphs"\s*:', text)) > 1  # the hook doubles the time that parsing takes
        found = json.loads(text, object_pairs_hook=_once if doubtful else None)
    except json.JSONDecodeError as error:
        raise ManifestError(path, error.lineno, f"it is cut off or garbled ({error.msg})", _MEND) from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(path, None, f"it is garbled ({error})", _MEND) from None
    if not isinstance(found, dict) or "plancache_manifest" not in found:
        raise ManifestError(path, None, "it is JSON, but no manifest", _MAKE)
    _check_version(path, "manifest", found["plancache_manifest"], VERSION)
    _check_version(path, "signature", found.get("signature_version"), SIGNATURE_VERSION)
    blocks = found.get("graphs")
    if not isinstance(blocks, list) or len(found) != 3:
        raise ManifestError(path, None, "it has other parts than a list of graphs", _MEND)
    graphs: dict[tuple[bytes, Constraints], int] = {}
    wanted = []
    for index, block in enumerate(blocks):
        try:
            one = _wanted(block)
        except MALFORMED as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ManifestError(path, _line(text, index), f"graph {index + 1} is garbled: {what}", _MEND) from None
        first = graphs.setdefault(one.identity, index)
        if first != index:
            where = f"it is there already, from line {_line(text, first)} on"
            raise ManifestError(path, _line(text, index), f"graph {index + 1} is a duplicate: {where}", "take one of the two out")
        wanted.append(one)
    return wanted


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # JSON's last one would win in silence
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice in one place")
    return found


def _check_version(path: str, what: str, found: object, mine: int) -> None:
    if type(found) is not int or found != mine:
        cure = f"use the plancache that wrote it, or move it away and {_RECORD}"
        raise ManifestError(path, None, f"its {what} version is {found!r}, this plancache reads {mine}", cure)


def _line(text: str, index: int) -> int:
    """The line on which a graph's block begins."""
    decoder, at = json.JSONDecoder(), text.index("[", text.index('"graphs"')) + 1
    for _ in range(index):
        _, at = decoder.raw_decode(text, _after(text, at))
        at = _after(text, at) + 1  # a comma
    return text.count("\n", 0, _after(text, at)) + 1


def _after(text: str, at: int) -> int:
    while text[at].isspace():
        at += 1
    return at


def _wanted(block: Any) -> Wanted:
    """The graph of a block. Raises one of `MALFORMED`."""
    if not isinstance(block, dict):
        raise ValueError("it is no block of fields")
    refuse_unknown(block, _BLOCK)
    description = description_of(block)
    wanted = Wanted(
        signature_of(description),
        _read_constraints(block["constraints"]) if "constraints" in block else _UNCONSTRAINED,
        _checked(block["count"], lambda count: type(count) is int and count >= 0, "count"),
        _checked(block.get("build_s"), lambda s: s is None or (type(s) in (int, float) and 0 <= s < math.inf), "build_s"),
        _read_recipe(block["recipe"]) if "recipe" in block else None,
    )
    if wanted.digest != block["sha256"]:
        raise ValueError("what it describes does not match its sha256")
    _ = description.summary  # where somebody made a digest for what is no graph
    vars(wanted)["description"] = description  # as decoding the signature would find it
    return wanted


def _checked(value: Any, good: Callable[[Any], bool], name: str) -> Any:
    if not good(value):
        raise ValueError(f"its {name} is {value!r}")
    return value


def _read_constraints(record: dict[str, Any]) -> Constraints:
    refuse_unknown(record, [each.name for each in fields(Constraints)])
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
    return Constraints(**given)


def _read_recipe(record: dict[str, Any]) -> Candidate:
    refuse_unknown(record, Candidate._fields)
    name, engine, knobs = record["name"], record["engine"], record["knobs"]
    good = type(name) is str and type(engine) is int and type(knobs) is dict and {type(value) for value in knobs.values()} <= {int}
    return Candidate(*_checked((name, engine, knobs), lambda _: good, "recipe"))


# ---- graphs -> text -------------------------------------------------------------------------------------------------

_BLOCK = frozenset(("graph", "sha256", "count", "build_s", "constraints", "recipe", *PARTS))
_ONE_A_LINE = ("tensors", "nodes")


def _block(wanted: Wanted) -> str:
    description = wanted.description
    parts: dict[str, Any] = {"graph": description.summary, "sha256": wanted.digest, "count": wanted.count}
    if wanted.build_s is not None:
        parts["build_s"] = round(wanted.build_s, 3)
    chosen = {each.name: getattr(wanted.constraints, each.name) for each in fields(Constraints)}
    constraints = {name: value for name, value in chosen.items() if value != getattr(Constraints, name)}
    if constraints:
        parts["constraints"] = constraints
    if wanted.recipe is not None:
        parts["recipe"] = wanted.recipe._asdict()
    parts |= written(description)
    lines = [f'   "{name}": {_json(value)}' for name, value in parts.items() if name not in _ONE_A_LINE]
    for name in _ONE_A_LINE:
        lines.append(f'   "{name}": [\n' + ",\n".join(f"    {_json(record)}" for record in parts[name]) + "\n   ]")
    return ",\n".join(lines)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
