"""What a command line names: a `package.module:function` and the graphs it yields, a device file."""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from plancache.cli.command import UsageError

SHIPPED = Path(__file__).parents[1] / "devices"
_CLOSE = 0.8  # h300 is another GPU; h20 and H200 are slips

_FORM = "package.module:function, such as plancache.graphs:examples"


def load(target: str) -> Callable[[], Any]:
    """The function. Raises `UsageError` where there is none, `LibraryError` where its module lacks cuDNN."""
    module_name, _, name = target.partition(":")
    if not module_name or not name or module_name.endswith((".py", "/")):
        raise UsageError(f"{target!r} names no function: give {_FORM}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module = _import(module_name)
    function = module
    for part in name.split("."):
        if not hasattr(function, part):
            raise UsageError(f"module {module_name} has no {name}{_suggestion(name, module)}")
        function = getattr(function, part)
    if not callable(function):
        raise UsageError(f"{target} is of type {type(function).__name__}, not a function: give one that yields graphs")
    return function  # type: ignore[no-any-return]  # any callable


def shipped_devices() -> list[str]:
    """The names of the device files that the package ships."""
    return sorted(file.stem for file in SHIPPED.glob("*.json"))


def refuse_slip(device: str) -> None:
    """Raises `UsageError` for the name of a shipped device file, mistyped."""
    shipped = shipped_devices()
    if "/" in device or "." in device or device in shipped or Path(device).exists():
        return
    near = difflib.get_close_matches(device.lower(), shipped, 1, _CLOSE)
    if near:
        raise UsageError(f"there is no device file {device!r}: did you mean {near[0]}, which the package ships?")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            cure = "run this where it can be imported, or install it"
            raise UsageError(f"there is no module {error.name!r} in {Path.cwd()} or among the installed ones: {cure}") from None
        raise _failure(f"importing {name}", error) from error
    except (Exception, SystemExit) as error:  # it is somebody's program, and may raise anything
        raise _failure(f"importing {name}", error) from error


def graphs_of(target: str, function: Callable[[], Any]) -> Iterator[Any]:
    """What the function yields, checked to be graphs or to have one. Raises `UsageError`."""
    try:
        returned = function()
    except (Exception, SystemExit) as error:
        raise _failure(f"{target}()", error) from error
    if not isinstance(returned, Iterable):
        raise UsageError(f"{target}() returned {type(returned).__name__}: let it yield graphs, or return a list of them")
    items, number = iter(returned), 0
    while True:
        try:
            item = next(items)
        except StopIteration:
            break
        except (Exception, SystemExit) as error:
            raise _failure(f"{target}()", error) from error
        number += 1
        _check(item, f"item {number} of {target}()")
        yield item
    if not number:
        raise UsageError(f"{target}() yielded no graphs: yield cudnn.pygraph objects, or objects with a .graph")


def _check(item: Any, what: str) -> None:
    from plancache.environment import load_frontend

    if not isinstance(getattr(item, "graph", item), load_frontend().pygraph):
        raise UsageError(f"{what} is of type {type(item).__name__}: yield cudnn.pygraph objects, or objects with a .graph")


def _failure(what: str, error: BaseException) -> Exception:
    """Why somebody's program failed: for want of cuDNN, or with an error of its own, and where that came from."""
    if isinstance(error, ImportError):
        from plancache.environment import load_frontend
        from plancache.errors import LibraryError

        try:
            load_frontend()
        except LibraryError as missing:
            return missing
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    where = f" at {places[-1].filename}:{places[-1].lineno}" if len(places) > 1 else ""
    return UsageError(f"{what} raised {type(error).__name__}: {error}{where}; --debug shows the traceback")


def _suggestion(name: str, module: Any) -> str:
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = difflib.get_close_matches(name, functions, 1)
    return f": did you mean {near[0]}?" if near else f": give {_FORM}"
