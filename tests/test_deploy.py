"""docs/deploy.md: its files and commands are run as they stand there, the stages of the container as folders."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from plancache.store.sealed import is_sealed

DOC = (Path(__file__).parents[1] / "docs" / "deploy.md").read_text()
DEVICE = Path(__file__).parents[1] / "plancache" / "devices" / "h200.json"
NO_BUILD = "2 hits (0 stored, 2 sealed), 0 builds"


def blocks(kind: str) -> list[tuple[str, str]]:
    """The blocks of a kind, each with what stands behind the kind."""
    return re.findall(rf"^```{kind}\b(.*)\n((?s:.*?))^```$", DOC, re.MULTILINE)


class Step(NamedTuple):
    """An instruction of a Dockerfile, and the stage that it is in."""

    stage: str
    name: str
    text: str


def steps() -> Iterator[Step]:
    ((_, text),) = blocks("dockerfile")
    stage = ""
    for line in filter(None, text.splitlines()):
        name, _, rest = line.partition(" ")
        if name == "FROM":
            stage = rest.partition(" AS ")[2] or "final"
        yield Step(stage, name, rest)


class Folder:
    """A stage that is built in a folder: its root and working directory, and the environment that it sets."""

    def __init__(self, root: Path, context: Path) -> None:
        self.root = root
        self.context = context
        self.work = root
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(("PLANCACHE_", "CUDNN_"))}
        self.environment |= {"PATH": str(Path(sys.executable).parent), "HOME": str(root / "home")}

    def with_compiler(self) -> Folder:
        """The system's programs are at hand, a C compiler among them."""
        self.environment["PATH"] += ":/usr/bin:/bin"
        return self

    def placed(self, text: str) -> str:
        """Absolute paths of the stage as they are in its folder."""
        return re.sub(r"(?<![\w.])/(app|build)\b", rf"{self.root}/\1", text)

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/sh", "-c", self.placed(command)], cwd=self.work, env=self.environment, capture_output=True, text=True, check=False
        )

    def take(self, step: Step, stages: dict[str, Folder]) -> str:
        """Does what a step says; returns what it printed."""
        if step.name == "WORKDIR":
            self.work = Path(self.placed(step.text))
            self.work.mkdir(parents=True, mode=0o755)
        elif step.name == "ENV":
            self.environment |= dict(pair.split("=", 1) for pair in self.placed(step.text).split())
        elif step.name == "COPY":
            self._copy(*step.text.split(), stages=stages)
        elif step.text.startswith("apt-get "):
            self.with_compiler()
        elif step.name == "RUN" and not step.text.startswith("pip "):  # what that brings is installed
            done = self.run(step.text)
            assert done.returncode == 0, (step, done.stderr)
            return done.stdout
        return ""

    def _copy(self, *words: str, stages: dict[str, Folder]) -> None:
        *names, to = words
        assert to == "./"
        for name in names:
            if not name.startswith("--from="):
                first = stages[names[0].removeprefix("--from=")] if names[0].startswith("--from=") else None
                shutil.copy2(self.context / name if first is None else first.placed(name), self.work)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the program, as the page shows them, and the manifest that one of them records."""
    folder = tmp_path_factory.mktemp("context")
    for name, text in blocks("python"):
        (folder / name.strip().removeprefix("file=")).write_text(text)
    shutil.copy(DEVICE, folder)
    (folder / "requirements.txt").write_text("plancache[cudnn]\n")
    recorder = Folder(tmp_path_factory.mktemp("recorder"), folder).with_compiler()
    recorder.work = folder
    done = recorder.run("python record.py")
    assert done.returncode == 0, done.stderr
    return folder


class Built(NamedTuple):
    """The stages after their last step, and what each step printed."""

    stages: dict[str, Folder]
    said: dict[Step, str]


@pytest.fixture(scope="module")
def built(context: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    stages: dict[str, Folder] = {}
    said = {}
    for step in steps():
        stage = stages.setdefault(step.stage, Folder(tmp_path_factory.mktemp(step.stage), context))
        said[step] = stage.take(step, stages)
    return Built(stages, said)


def test_the_container_starts_with_no_build(built: Built) -> None:
    """What the second stage plans comes from the bundle alone, without a compiler, and the page shows what it prints."""
    final = built.stages["final"]
    assert final.environment["PLANCACHE_BUILD"] == "forbid"
    assert is_sealed(final.work / "plans.sqlite3")
    assert said_by(built, "python start.py").startswith(NO_BUILD)
    assert f"`{NO_BUILD}`" in DOC
    assert sorted(file.name for file in final.work.iterdir() if file.name != "__pycache__") == [
        "h200.json",
        "plans.sqlite3",
        "requirements.txt",
        "serve.json",
        "serving.py",
        "start.py",
    ]
    assert not (final.root / "home").exists()


def said_by(built: Built, command: str) -> str:
    (said,) = [said for step, said in built.said.items() if step.text.startswith(command)]
    return said


def test_both_stages_say_that_the_device_can_use_all_of_it(built: Built) -> None:
    """For the device file: export of what it wrote, check of what the image finds."""
    assert "2 of 2 can be used on NVIDIA H200\n" in said_by(built, "plancache export")
    assert "without a stored plan" not in said_by(built, "plancache export")
    assert "usable here: 2 of 2 graphs for NVIDIA H200" in said_by(built, "plancache check")


def test_a_plan_that_is_missing_fails_the_build_of_the_image(built: Built, tmp_path: Path) -> None:
    """The program asks for another graph than the bundle holds: both gates end with an error, the second names the graph."""
    final = built.stages["final"]
    other = Folder(tmp_path, final.context)
    other.work, other.environment = shutil.copytree(final.work, tmp_path / "app"), dict(final.environment)
    (other.work / "serving.py").write_text((final.context / "serving.py").read_text().replace("m=128", "m=256"))
    start = other.run("python start.py h200.json")
    shutil.copy(final.context / "record.py", other.work)
    record = other.with_compiler().run("PLANCACHE_DIR=$PWD/cache PLANCACHE_BUILD=allow PLANCACHE_MODE=readwrite python record.py")
    check = other.run("plancache check serve.json --device h200.json")
    assert start.returncode != 0
    assert "PlanNotFoundError: no stored plan for matmul" in start.stderr
    assert record.returncode == 0, record.stderr
    assert check.returncode == 1
    assert "usable here: 2 of 3 graphs" in check.stdout


def test_the_steps_of_ci(context: Path, tmp_path: Path) -> None:
    """Each ends well; what is imported elsewhere is what was exported, and starts the program without a build."""
    (_, make), (_, carry) = blocks("sh")
    job, target = Folder(tmp_path / "job", context).with_compiler(), Folder(tmp_path / "target", context)
    for folder in (job, target):
        folder.root.mkdir(mode=0o700)
    for name in ("serve.json", "h200.json"):
        shutil.copy2(context / name, job.root)
    done = job.run(f"set -e\n{make}")
    assert done.returncode == 0, done.stderr
    assert "usable here: 2 of 2 graphs" in done.stdout
    for file in (job.root / "plans.sqlite3", *(context / name for name in ("h200.json", "serving.py", "start.py"))):
        shutil.copy2(file, target.root)
    done = target.run(f"set -e\n{carry}\nPLANCACHE_DIR=$PWD/store PLANCACHE_BUILD=forbid python start.py h200.json")
    assert done.returncode == 0, done.stderr
    assert "2 plans, 2 stored\n2 of 2 can be used on NVIDIA H200\n2 hits (2 stored, 0 sealed), 0 builds" in done.stdout
