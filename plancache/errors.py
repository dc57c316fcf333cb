"""Every exception and warning of plancache. Facts are attributes; the message names the cure.

cuDNN's own errors (`cudnn.cudnnGraphNotSupportedError` and the like) pass through unchanged.
"""

from __future__ import annotations


class PlancacheError(Exception):
    """Base of all errors that plancache raises."""


class PlancacheWarning(UserWarning):
    """Something is degraded, but every plan handed out is still right."""


class SettingsError(PlancacheError, ValueError):
    """A setting or one of plancache's environment variables has a value that it cannot have."""


class GraphStateError(PlancacheError, ValueError):
    """The graph is empty, or its caller already planned or built it."""


class UncacheableGraphError(PlancacheError, ValueError):
    """The graph cannot be copied exactly, and this request needs a copy (`reason` says why)."""

    def __init__(self, reason: str, cure: str) -> None:
        super().__init__(f"this graph cannot be cached: {reason}; {cure}")
        self.reason = reason
        self.cure = cure

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.reason, self.cure)


class PlanNotFoundError(PlancacheError, LookupError):
    """No stored plan answers the request, and building was forbidden (`digest` names the key)."""

    def __init__(self, digest: str, summary: str, reason: str) -> None:
        super().__init__(
            f"no stored plan for {summary} (key {digest[:16]}): {reason}; "
            "build it beforehand (plancache warm) or allow builds (build='allow', PLANCACHE_BUILD=allow)"
        )
        self.digest = digest
        self.summary = summary
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.digest, self.summary, self.reason)


class OperandError(PlancacheError, ValueError):
    """An operand given to a plan is missing, foreign, or not what the graph declares."""


class WorkspaceError(PlancacheError, RuntimeError):
    """The plan needs a workspace that was not given, is too small, or cannot be allocated now."""


class NotExecutableError(PlancacheError, RuntimeError):
    """The plan was made for a device file, or its cache is closed: it can be inspected, not run."""


class ClosedError(PlancacheError, ValueError):
    """The cache was closed."""


class CaptureError(PlancacheError, RuntimeError):
    """A plan was asked for while the current stream is capturing, and is not ready: plan and run it once before."""


class StruckError(PlancacheError, RuntimeError):
    """Building this plan ended two processes (`digest` names the key), so it is not tried a third time."""

    def __init__(self, digest: str, reason: str) -> None:
        super().__init__(
            f"building plan {digest[:16]} is not tried again: {reason}; to try once more: plancache rm --verdicts {digest[:16]}"
        )
        self.digest = digest
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.digest, self.reason)


class ProofError(PlancacheError, RuntimeError):
    """Tuning showed cuDNN's first choice wrong and found no right plan (`digest` names the key): nothing is kept."""

    def __init__(self, digest: str, reason: str) -> None:
        super().__init__(f"no right plan was found for {digest[:16]}, {reason}; report it to NVIDIA, and compute this graph another way")
        self.digest = digest
        self.reason = reason

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.digest, self.reason)


class DeniedError(PlancacheError, RuntimeError):
    """cuDNN's choice for this graph was shown wrong before, and there is no other (`digest` names the key, `denial` the denial)."""

    def __init__(self, digest: str, engine: str, reason: str, denial: str) -> None:
        super().__init__(
            f"no plan for {digest[:16]}: {engine} is denied ({reason}), and no other can be built here; "
            f"bar it (Constraints(barred_engines=...)), or, where it is right after all: plancache rm --verdicts {denial[:16]}"
        )
        self.digest = digest
        self.engine = engine
        self.reason = reason
        self.denial = denial

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        return type(self), (self.digest, self.engine, self.reason, self.denial)


class DeviceError(PlancacheError, RuntimeError):
    """There is no GPU to plan for, or the one named does not exist."""


class DeviceFileError(PlancacheError, ValueError):
    """A device file cannot be read, lacks properties, or comes from another cuDNN version."""


class ManifestError(PlancacheError, ValueError):
    """A manifest cannot be read or written (`path`, and the `line` where one is known)."""

    def __init__(self, path: str, line: int | None, reason: str, cure: str) -> None:
        place = path if line is None else f"{path}, line {line}"
        super().__init__(f"manifest {place}: {reason}; {cure}")
        self.path = path
        self.line = line
        self.reason = reason
        self.cure = cure

    def __reduce__(self) -> tuple[type, tuple[str, int | None, str, str]]:
        return type(self), (self.path, self.line, self.reason, self.cure)


class LibraryError(PlancacheError, ImportError):
    """nvidia-cudnn-frontend or libcudnn cannot be loaded."""


class CompilerError(PlancacheError, RuntimeError):
    """Building without a GPU is not possible here, or the child process that does it died."""


class StoreError(PlancacheError, OSError):
    """The cache could not be read or written. Raised only in strict mode, else a warning and a miss."""


class DamagedStoreError(StoreError):
    """A database file is damaged, or no database."""


class SealedError(StoreError):
    """A sealed file cannot be used, or a database cannot be sealed or unsealed (`path` names it)."""

    def __init__(self, path: object, reason: str, cure: str) -> None:
        super().__init__(f"{path}: {reason}; {cure}")
        self.path = str(path)
        self.reason = reason
        self.cure = cure

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.path, self.reason, self.cure)


class CorruptEntryError(StoreError):
    """A stored entry does not match its checksum or its key."""
