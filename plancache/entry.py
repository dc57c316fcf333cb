"""The entry, its checked byte format, and `usable`.

Nothing of a stored row is decompressed or given to cuDNN before its checksum, which covers key, metadata and the
compressed payload, was found right. There is no pickle.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from plancache.errors import CorruptEntryError, StoreError
from plancache.key import COMPONENTS, PlanKey
from plancache.lazy import lazy

if TYPE_CHECKING:
    from plancache.description import Description

Quality = Literal["compiled", "heuristic", "tuned"]
QUALITIES: tuple[Quality, ...] = ("compiled", "heuristic", "tuned")
"""From least to best: a lesser entry never replaces a better one."""

FORMAT = 1
MAX_BLOB_BYTES = 256 << 20
"""Bound on an unpacked plan: the largest seen is 0.2 MB; a Python engine's holds compiled kernels too."""

MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, struct.error)  # what other bytes can raise
_MAX_TIME_S = 1e11  # the year 5138
_LEVEL = 3  # zstd: 3.5 to 4 times smaller, and unpacks in 30 to 80 us


class Candidate(NamedTuple):
    """One engine configuration that the heuristics named: the plan's name, engine id and knobs."""

    name: str
    engine: int
    knobs: dict[str, int]


class Trial(NamedTuple):
    """What tuning learned of a candidate. `result`: won, tied, slower, pruned, failed, wrong, or skipped (never tried).

    `time_us`: median GPU time of a run with a cold L2, in microseconds, between `low_us` and `high_us` with 95 percent
    confidence, over `runs` runs; None where it was not timed. `rank`: its place in the heuristics' order.
    """

    name: str
    engine: int
    knobs: dict[str, int]
    rank: int
    build_s: float
    workspace_size: int | None
    time_us: float | None
    low_us: float | None
    high_us: float | None
    runs: int
    result: str
    reason: str


class Layout(NamedTuple):
    """A tensor as lowering resolved it: dims and strides in elements, data type by the frontend's name."""

    dim: tuple[int, ...]
    stride: tuple[int, ...]
    data_type: str | None


@dataclass(frozen=True, eq=False)  # a hit imports this module, and each generated method costs it 0.2 ms
class Built:
    """What a build brought: all of an entry that cuDNN knows.

    `operands`: canonical uids that execution must bind, ascending. `layouts`: lowered tensors by canonical uid.
    `recipe`: the candidate that was chosen. `requirements`: what this engine needs beyond the key. `timings_s`:
    seconds of each step of the build.
    """

    blob: bytes = field(repr=False)
    workspace_size: int
    operands: tuple[int, ...]
    layouts: Mapping[int, Layout] = field(repr=False)
    recipe: Candidate
    candidates: tuple[Candidate, ...] = field(repr=False)
    behavior_notes: tuple[str, ...]
    requirements: Mapping[str, str]
    timings_s: Mapping[str, float]


@dataclass(frozen=True, eq=False, repr=False)
class Entry(Built):
    """A stored plan, and all that was learned when it was built. `proof`: `none` where nothing was run.

    `trials`: what tuning tried, fastest first; `conditions`: of the GPU while it did.
    """

    key: PlanKey
    quality: Quality
    created_at: float
    provenance: Mapping[str, Any] = field(repr=False)
    proof: str = "none"
    tolerance: float | None = None
    trials: tuple[Trial, ...] = field(default_factory=tuple, repr=False)
    conditions: Mapping[str, Any] = field(default_factory=dict, repr=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What a hit does not need is decoded when somebody asks for it. Raises `CorruptEntryError`."""
            learned = self.__dict__.get("_learned")
            if learned is None or name not in _LEARNED:
                raise AttributeError(name)
            try:
                self.__dict__.update(_decode_learned(learned))
                return self.__dict__[name]
            except MALFORMED as error:
                raise CorruptEntryError(f"entry {self.key.hex[:16]} cannot be read: {error}") from error

    @classmethod
    def of(cls, built: Built, **more: Any) -> Entry:
        return cls(**{f.name: getattr(built, f.name) for f in fields(Built)}, **more)

    @property
    def build_s(self) -> float:
        """Seconds that building took, lowering and planning included."""
        return sum(self.timings_s.values())

    @lazy
    def description(self) -> Description:
        """The graph that this plan computes."""
        from plancache.description import decode

        return decode(self.key.components["signature"])

    @property
    def engine(self) -> str:
        """The plan's name in cuDNN's terms, such as `eng7_k24=21`."""
        return self.recipe.name

    def __repr__(self) -> str:
        return f"<Entry {self.key.hex[:16]} {self.quality} {self.engine}>"


# ---- bytes ----------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """An entry as it lies in a store."""

    key: bytes
    preimage: bytes
    facts: bytes
    payload: bytes
    checksum: bytes


def pack(entry: Entry) -> Row:
    """The row of an entry. Raises `StoreError` for a plan that is too large to be read back."""
    import zstandard

    if len(entry.blob) > MAX_BLOB_BYTES:
        raise StoreError(f"a plan of {len(entry.blob)} bytes is not stored; {MAX_BLOB_BYTES} are the most")
    facts = encode_facts(entry)
    preimage = join_preimages(entry.key.preimages)
    payload = zstandard.ZstdCompressor(level=_LEVEL).compress(entry.blob)
    return Row(entry.key.digest, preimage, facts, payload, checksum(entry.key.digest, preimage, facts, payload))


def encode_facts(built: Built) -> bytes:
    """All but key and blob, as JSON. What was learned of other candidates is a text in it: a hit does not read it."""
    facts = {f.name: getattr(built, f.name) for f in fields(built) if f.name not in ("blob", "key")}
    learned = json.dumps({name: facts.pop(name) for name in _LEARNED if name in facts}, separators=(",", ":"))
    facts = {"format": FORMAT, "blob_bytes": len(built.blob), **facts, "learned": learned}
    return json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode()


def decode_facts(data: bytes) -> tuple[dict[str, Any], int]:
    """The fields that `encode_facts` wrote, typed; and the blob's size in bytes."""
    facts, size = _decode_facts(data)
    learned = facts.pop("_learned")
    return {**facts, **_decode_learned(learned)} if learned is not None else facts, size


def _decode_facts(data: bytes) -> tuple[dict[str, Any], int]:
    """The same with what was learned as the text that it is, `_learned`; None where it is among the others, as it once was."""
    facts = json.loads(data)
    if facts.pop("format") != FORMAT:
        raise ValueError("its format is not one that this version reads")
    size = facts.pop("blob_bytes")
    learned = facts.pop("learned", None)
    facts["operands"] = tuple(facts["operands"])
    facts["layouts"] = {int(uid): Layout(tuple(dim), tuple(stride), kind) for uid, (dim, stride, kind) in facts["layouts"].items()}
    facts["recipe"] = Candidate(*facts["recipe"])
    facts["behavior_notes"] = tuple(facts["behavior_notes"])
    if learned is None:
        facts.update(_typed(facts))
    for name in facts.keys() - _KNOWN:  # of a later version, which adds only what can be left out
        del facts[name]
    facts["_learned"] = learned
    return facts, size


def _decode_learned(text: str) -> dict[str, Any]:
    found = json.loads(text)
    return {**found, **_typed(found)}


def _typed(found: Mapping[str, Any]) -> dict[str, Any]:
    """What was learned, in its types; of an entry without a tuning there are the candidates' names only."""
    typed: dict[str, Any] = {"candidates": tuple(Candidate(*candidate) for candidate in found["candidates"])}
    if "trials" in found:
        typed["trials"] = tuple(Trial(*trial) for trial in found["trials"])
    return typed


_LEARNED = ("candidates", "trials", "conditions")
_KNOWN = frozenset(f.name for f in fields(Entry))


def check_facts(facts: Mapping[str, Any]) -> None:
    """Raises one of `MALFORMED` for an entry's facts that are not of the types that are calculated with and shown."""
    if not (
        all(is_time(seconds) for seconds in (facts["created_at"], *facts["timings_s"].values()))
        and type(facts["workspace_size"]) is int
        and facts["quality"] in QUALITIES
        and type(facts["recipe"][0]) is str
    ):
        raise ValueError("its facts are not of the types that were written")


def is_time(value: object) -> bool:
    """Whether a value is a number of seconds that calendars can hold."""
    return type(value) in (int, float) and abs(value) < _MAX_TIME_S  # type: ignore[arg-type]  # it is a number by then


def checksum(key: bytes, preimage: bytes, facts: bytes, payload: bytes) -> bytes:
    """SHA-256 over all parts of a row, each after its length."""
    digest = hashlib.sha256(b"plancache-entry:%d\0" % FORMAT)
    for part in (key, preimage, facts, payload):
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.digest()


def unpack(row: Row, key: PlanKey | None = None) -> Entry:
    """The entry of a row, checked: its checksum, its sizes, and that it is of `key` where one is given.

    Raises `CorruptEntryError`, before anything was decompressed, for a row that was changed.
    """
    name = row.key.hex()[:16] if isinstance(row.key, bytes) else "?"
    if not all(isinstance(part, bytes) for part in row) or checksum(*row[:4]) != row.checksum:
        raise CorruptEntryError(f"entry {name} does not match its checksum")
    try:
        if key is None:
            key = PlanKey(split_preimage(row.preimage))
        if key.digest != row.key or join_preimages(key.preimages) != row.preimage:
            raise ValueError("it is stored under another key than its own")
        facts, size = _decode_facts(row.facts)
        check_facts(facts)
        learned = facts.pop("_learned")
        if learned is None:
            return Entry(key=key, blob=_decompress(row.payload, size), **facts)
        entry = Entry(key=key, blob=_decompress(row.payload, size), candidates=(), **facts)
        for name in _LEARNED:
            del entry.__dict__[name]
        entry.__dict__["_learned"] = learned
        return entry
    except MALFORMED as error:
        raise CorruptEntryError(f"entry {name} cannot be read: {error}") from error


def _decompress(payload: bytes, size: int) -> bytes:
    import zstandard

    # the frame's own size counts, not max_output_size: zstandard ignores that where the frame names one
    try:
        stated = zstandard.get_frame_parameters(payload).content_size
        if not 0 <= stated == size <= MAX_BLOB_BYTES:
            raise ValueError(f"its payload states {stated} bytes, {size} are expected")
        blob = zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise ValueError(f"its payload does not unpack ({error})") from error
    if len(blob) != size:
        raise ValueError(f"its payload holds {len(blob)} bytes, {size} are expected")
    return blob


def join_preimages(preimages: tuple[bytes, ...]) -> bytes:
    return b"".join(struct.pack("<I", len(preimage)) + preimage for preimage in preimages)


def split_preimage(data: bytes) -> tuple[bytes, ...]:
    parts, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        parts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(data) or len(parts) != len(COMPONENTS):
        raise ValueError("its key's preimage is malformed")
    return tuple(parts)


# ---- may it run here? -----------------------------------------------------------------------------------------------


def usable(entry: Entry, here: Mapping[str, str | None]) -> str | None:
    """None where the entry may run here, else the reason in one line.

    `here`: what this process has, by requirement name; a value of None is a thing that is not there.
    """
    for name, needed in entry.requirements.items():
        found = here.get(name)
        if found is None:
            return f"it needs {name} {needed}, which is not known to be here"
        if found != needed:
            return f"it needs {name} {needed}, here is {found}"
    return None
