"""Errors carry their facts as attributes, keep them across processes, and are the builtin that callers expect."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from plancache import errors

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value)]
EXPECTED = {
    "ClosedError": ValueError,
    "SettingsError": ValueError,
    "GraphStateError": ValueError,
    "UncacheableGraphError": ValueError,
    "PlanNotFoundError": LookupError,
    "OperandError": ValueError,
    "WorkspaceError": RuntimeError,
    "NotExecutableError": RuntimeError,
    "DeviceError": RuntimeError,
    "DeviceFileError": ValueError,
    "ManifestError": ValueError,
    "LibraryError": ImportError,
    "CompilerError": RuntimeError,
    "StoreError": OSError,
    "DamagedStoreError": OSError,
    "SealedError": OSError,
    "CorruptEntryError": OSError,
    "CaptureError": RuntimeError,
    "StruckError": RuntimeError,
    "ProofError": RuntimeError,
    "DeniedError": RuntimeError,
}


def make(kind: Any) -> Any:
    """An error of this class, with another text for each of its facts."""
    facts = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "args", "kwargs")]
    return kind(*[f"the {name}" for name in facts] or ["what is wrong; what to do"])


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_survives_pickling_with_its_facts(kind: Any, protocol: int) -> None:
    """Class, message, arguments and attributes come back; a child process hands its errors to its parent."""
    error = make(kind)
    for found in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(found) is kind
        assert (str(found), found.args) == (str(error), error.args)
        assert vars(found) == vars(error)


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_keeps_each_fact_as_an_attribute(kind: Any) -> None:
    """Facts are attributes, and the message names them."""
    error = make(kind)
    for name in inspect.signature(kind.__init__).parameters.keys() - {"self", "args", "kwargs"}:
        assert getattr(error, name) == f"the {name}"
        assert f"the {name}" in str(error)


def test_an_error_is_the_builtin_that_a_caller_expects() -> None:
    """Each error can be caught as plancache's or as the builtin; a class that is added needs a line here."""
    kinds = {kind.__name__: kind for kind in CLASSES}
    assert kinds.keys() - EXPECTED.keys() == {"PlancacheError", "PlancacheWarning"}
    for name, builtin in EXPECTED.items():
        assert issubclass(kinds[name], builtin)
        assert issubclass(kinds[name], errors.PlancacheError)
    assert issubclass(errors.PlancacheWarning, UserWarning)
