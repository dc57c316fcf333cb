"""The direction of the modules, and what an import may load: `import plancache` must cost next to nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import plancache

PACKAGE = Path(plancache.__file__).parent
MIGRATIONS = PACKAGE.parent / "migrations"

ORDER = """
hook lazy errors settings encoding signature description outline environment key entry listing words jsonform manifest recording
capture marks
store store.place store.gate store.connection store.schema store.tags store.database store.sealed store.retention store.levels singleflight
copies executable backend children compiler operands inputs proof conditions jury autotune workbench target
building jobs tuner isolated explaining checking warming kernels
plan memory statistics events carrying stored loaded built served cache graphs
course standin intercept starting launcher.sitecustomize cli pytest_plugin __main__
""".split()
"""A module imports only from those before it (CONTRIBUTING.md); those of one package may import one another."""

MAY_IMPORT_CUDNN = {"backend", "course", "environment", "executable", "graphs"}
HEAVY = ("cudnn", "torch", "numpy", "sqlalchemy", "alembic", "zstandard", "filelock", "platformdirs")
AT_MODULE_LEVEL = {"store.schema": {"sqlalchemy"}}


class Import(NamedTuple):
    """`module` imports `target`; `inside`: within a function; `typing`: for type checkers only."""

    module: str
    target: str
    inside: bool
    typing: bool


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> Iterator[Import]:
    yield from _walk(ast.parse(file.read_text()), name_of(file), inside=False, typing=False)


def _walk(node: ast.AST, module: str, *, inside: bool, typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(module, alias.name, inside, typing) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{module}: imports are absolute"
            yield from (Import(module, target, inside, typing) for target in _targets(child))
        else:
            within = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            checked = typing or (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING")
            yield from _walk(child, module, inside=within, typing=checked)


def _targets(statement: ast.ImportFrom) -> list[str]:
    """The modules that `from package import name` imports: `plancache.errors` where the name is a module."""
    assert statement.module is not None
    names = [f"{statement.module}.{alias.name}" for alias in statement.names]
    return [name if is_module(name) else statement.module for name in names]


def is_module(name: str) -> bool:
    parts = name.split(".")
    place = PACKAGE.parent.joinpath(*parts)
    return parts[0] == "plancache" and (place.with_suffix(".py").exists() or (place / "__init__.py").exists())


FILES = sorted(PACKAGE.rglob("*.py"))
IMPORTS = [found for file in FILES for found in imports_of(file)]
OWN = [found for found in IMPORTS if found.target.split(".")[0] == "plancache" and found.module]


def rank(module: str) -> int:
    name = module if module in ORDER else module.split(".")[0]
    assert name in ORDER, f"{module} has no place in the order: add it to CONTRIBUTING.md and here"
    return ORDER.index(name)


@pytest.mark.parametrize("module", sorted({name_of(file) for file in FILES} - {""}))
def test_every_module_has_a_place_in_the_order(module: str) -> None:
    """A new module is put where it belongs before anything imports it."""
    assert rank(module) >= 0


def test_a_module_imports_only_from_those_above_it() -> None:
    """No import goes down the order, at module level, in a function or for type checkers."""
    wrong = []
    for found in OWN:
        target = found.target.removeprefix("plancache").lstrip(".")
        same_package = target.split(".")[0] == found.module.split(".")[0] == "cli"
        if target and not same_package and rank(target) >= rank(found.module):
            wrong.append(found)
    assert wrong == []


def test_only_the_version_is_taken_from_the_package_itself() -> None:
    """A public name taken from `plancache` would import a module past the order."""
    taken = [
        (name_of(file), alias.name)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "plancache"
        for alias in node.names
        if not is_module(f"plancache.{alias.name}")
    ]
    assert {name for _, name in taken} <= {"__version__"}
    assert not [found for found in IMPORTS if found.target == "plancache" and found.module and (found.module, "__version__") not in taken]


def test_cudnn_is_imported_by_few_and_inside_functions_only() -> None:
    """Everything else works where there is no cuDNN."""
    found = [found for found in IMPORTS if found.target.split(".")[0] == "cudnn"]
    assert {each.module for each in found} <= MAY_IMPORT_CUDNN
    assert [each for each in found if not each.inside] == []


def test_nothing_heavy_is_imported_at_module_level() -> None:
    """torch, cuDNN, SQLAlchemy, Alembic, zstandard and filelock are imported where they are used."""
    at_module_level = [found for found in IMPORTS if not (found.inside or found.typing) and found.target.split(".")[0] in HEAVY]
    wrong = [each for each in at_module_level if each.target.split(".")[0] not in AT_MODULE_LEVEL.get(each.module, ())]
    assert wrong == []


def test_plan_imports_no_torch() -> None:
    """It takes torch's tensors by looking torch up where a caller has imported it."""
    assert [found for found in IMPORTS if found.module == "plan" and found.target.split(".")[0] == "torch"] == []


def test_the_package_itself_imports_its_modules_lazily() -> None:
    """`plancache/__init__` names public modules for type checkers and on demand, and imports none."""
    assert [found for found in imports_of(PACKAGE / "__init__.py") if found.target.startswith("plancache") and not found.typing] == []


def test_migrations_do_not_depend_on_the_package() -> None:
    """A migration stays as it was when the tables move on."""
    files = sorted(MIGRATIONS.rglob("*.py"))
    targets = {
        (alias.name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert len(files) > 2
    assert targets <= {"alembic", "sqlalchemy", "__future__"}


# ---- what a fresh process loads -------------------------------------------------------------------------------------


def loaded_by(program: str) -> set[str]:
    """The heavy packages that a program has loaded at its end, in a process of its own."""
    ending = f"\nimport sys; print(*sorted(set({HEAVY}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program + ending], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_plancache_loads_nothing_heavy() -> None:
    """`import plancache` needs and loads neither cuDNN nor torch nor SQLAlchemy, and names everything all the same."""
    assert loaded_by("import plancache; assert 'PlanCache' in dir(plancache)") == set()


@pytest.mark.parametrize("name", plancache.__all__)
def test_every_public_name_is_there_without_cudnn_torch_and_sqlalchemy(name: str) -> None:
    """A public name can be imported where none of them is installed."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('cudnn', 'torch', 'sqlalchemy', 'alembic')))"
    program = f"{blocked}\nimport plancache\nassert plancache.{name} is not None\nfor n in list(sys.modules):\n"
    assert loaded_by(program + "    sys.modules[n] is None and sys.modules.pop(n)") <= {"platformdirs"}


def test_looking_into_a_cache_loads_no_sqlalchemy(tmp_path: Path) -> None:
    """The look-up of a fresh process goes through sqlite3 alone."""
    write = f"""
from pathlib import Path
from plancache.store.database import Database
database = Database(Path({str(tmp_path)!r}) / "plans.sqlite3", lock_timeout_s=10)
"""
    assert {"sqlalchemy", "alembic", "filelock"} <= loaded_by(write + "database.upgrade()")
    assert loaded_by(write + "database.get(b'key'); list(database.listing()); database.count_uses({b'key': 1}, 1.0)") == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    """The lazy names do not swallow mistakes."""
    with pytest.raises(AttributeError, match="has no attribute 'PlanCahce'"):
        _ = plancache.PlanCahce
