"""The command line: what each command prints, its exit codes, and what it does not import."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Result

pytest.importorskip("cudnn")

from plancache import Device
from plancache.cli import COMMANDS, command, main, tables
from plancache.cli.libraries import search
from plancache.cli.machine import driver_library
from plancache.cli.warm import first_line
from plancache.environment import cuda_version, version_text
from plancache.errors import DeviceError
from plancache.settings import Settings
from plancache.store.connection import HEAD

MODULE = """
import cudnn
from plancache import graphs

def convolution():
    return graphs.conv_bias_relu(batch=2, in_channels=8, out_channels=8, height=8, width=8)

def product():
    return graphs.batched_matmul(batch=1, m=32, n=32, k=32)

def two():
    print("a word of the program's own")
    yield convolution()
    yield product().graph

def no_engine():
    types = dict(io_data_type=cudnn.data_type.HALF, intermediate_data_type=cudnn.data_type.FLOAT)
    graph = cudnn.pygraph(compute_data_type=cudnn.data_type.FLOAT, **types)
    image = graph.tensor(dim=[1, 7, 3, 3], stride=[63, 9, 3, 1], data_type=cudnn.data_type.INT8)
    weight = graph.tensor(dim=[5, 7, 3, 3], stride=[63, 9, 3, 1], data_type=cudnn.data_type.DOUBLE)
    graph.conv_fprop(image=image, weight=weight, padding=[1, 1], stride=[1, 1], dilation=[1, 1]).set_output(True)
    return graph

def some_bad():
    yield no_engine()
    yield cudnn.pygraph()
    yield cudnn.pygraph()
    yield product()

def interrupted():
    yield product()
    raise KeyboardInterrupt

def breaks():
    yield product()
    raise OSError("no shapes today")

def empty():
    return []

def nothing():
    pass

def words():
    yield "x"

def needs(argument):
    yield argument

number = 3
"""


def clean_environment(**more: str) -> dict[str, str]:
    """This environment without what would change a command's answer."""
    barred = ("PLANCACHE_", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDNN_", "NVIDIA_TF32")
    return {name: value for name, value in os.environ.items() if not name.startswith(barred)} | more


def program(*arguments: str, cwd: Path, **environment: str) -> Result:
    command = [sys.executable, "-m", "plancache", *arguments]
    done = subprocess.run(command, cwd=cwd, env=clean_environment(**environment), capture_output=True, text=True, check=False)
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module `warmable`."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "warmable.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="session")
def warming(folder: Path) -> Result:
    """What the first `plancache warm` said, which filled folder/cache."""
    return program("warm", "warmable:two", "--device", "h200", "--cache-dir", "cache", cwd=folder)


@pytest.fixture(scope="session")
def cache(folder: Path, warming: Result) -> Path:
    """A cache directory with two plans."""
    assert warming.code == 0, warming.err
    return folder / "cache"


Run = Callable[..., Result]


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """`main` in this process, in the program's folder, with a cache directory of its own unless one is named."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("PLANCACHE_DIR", str(tmp_path / "cache"))

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        code = main(arguments)
        return Result(code, *capsys.readouterr())

    yield run
    sys.modules.pop("warmable", None)


def is_one_line(text: str) -> bool:
    return text.startswith("plancache: error: ") and text.count("\n") == 1 and text.endswith("\n")


# ---- all commands


def test_without_a_command_it_prints_help_and_exits_with_2(run: Run) -> None:
    result = run()
    assert result.code == 2 and result.out == ""
    assert all(name in result.err and command(name).summary[:30] in result.err for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_named_as_it_is_called(name: str) -> None:
    """The table that commands are imported by and what they say of themselves agree."""
    assert command(name).name == name


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example_of_it(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.code == 0
    assert f"example:\n  plancache {command}" in result.out


def test_version(run: Run) -> None:
    import plancache

    assert run("--version") == (0, f"plancache {plancache.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments", [("lss",), ("ls", "--jsno"), ("show",), ("warm",), ("doctor", "--force"), ("doctor", "--device-ordinal", "x")]
)
def test_wrong_usage_is_one_line_and_exits_with_2(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.code == 2 and result.out == ""
    assert is_one_line(result.err)


def test_the_cache_directory_is_taken_before_and_after_the_command(run: Run, cache: Path) -> None:
    before, after = run("--cache-dir", str(cache), "ls", "--json"), run("ls", "--json", "--cache-dir", str(cache))
    assert before == after and len(json.loads(after.out)) == 2


def test_a_wrong_setting_is_one_line_and_exits_with_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANCACHE_MODE", "of")
    result = run("ls")
    assert result.code == 1 and is_one_line(result.err)
    assert "readwrite" in result.err


def test_debug_shows_the_traceback_before_the_line(run: Run) -> None:
    result = run("show", "ab", "--debug")
    assert result.code == 1
    assert result.err.startswith("Traceback") and result.err.splitlines()[-1].startswith("plancache: error: ")


def test_a_reader_that_goes_away_is_no_error_to_talk_about(cache: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "plancache", "ls", "--cache-dir", str(cache)]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [["ls"], ["ls", "--json"], ["show", "KEY"], ["--help"]])
def test_listing_imports_neither_cudnn_nor_torch_nor_sqlalchemy(run: Run, cache: Path, arguments: list[str]) -> None:
    key = json.loads(run("ls", "--json", "--cache-dir", str(cache)).out)[0]["key"]
    arguments = [key if argument == "KEY" else argument for argument in arguments]
    code = f"""if True:
        import sys
        from plancache.cli import main
        assert main({arguments!r}) == 0
        heavy = {{"cudnn", "torch", "sqlalchemy", "alembic", "numpy"}} & {{name.partition(".")[0] for name in sys.modules}}
        sys.exit(f"imported {{heavy}}" if heavy else 0)
    """
    environment = clean_environment(PLANCACHE_DIR=str(cache))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- ls


def test_ls_of_an_empty_cache_says_where_it_looked_and_why_there(run: Run, tmp_path: Path) -> None:
    result = run("ls")
    assert result.code == 0 and f"no plans are stored in {tmp_path / 'cache'} (PLANCACHE_DIR)" in result.out
    assert "(--cache-dir)" in run("ls", "--cache-dir", str(tmp_path)).out
    assert run("ls", "--json") == (0, "[]\n", "")
    assert not (tmp_path / "cache").exists()


def test_ls_shows_every_plan_in_aligned_columns(run: Run, cache: Path) -> None:
    result = run("ls", "--cache-dir", str(cache))
    header, convolution, product, *rest = result.out.splitlines()
    assert header.split() == ["KEY", "GRAPH", "ENGINE", "QUALITY", "SIZE", "BUILD", "MS", "HITS", "AGE", "DEVICE", "CUDNN"]
    assert "conv_fprop+bias+relu [2x8x8x8, 8x8x3x3] bfloat16" in convolution and "matmul [1x32x32, 1x32x32] bfloat16" in product
    for column, text in (("ENGINE", "eng"), ("QUALITY", "compiled"), ("DEVICE", "NVIDIA H200"), ("CUDNN", "9.")):
        at = header.index(column)
        assert convolution[at:].startswith(text) and product[at:].startswith(text)
    assert re.fullmatch(r"2 plans, [\d.]+ kB, in .*/cache", rest[-1])


def test_ls_json_is_the_array_of_listed_entries(run: Run, cache: Path) -> None:
    from plancache import PlanCache

    with PlanCache(cache) as opened:
        expected = [listed.to_dict() for listed in opened.entries()]
    shown = json.loads(run("ls", "--json", "--cache-dir", str(cache)).out)
    assert len(shown) == 2 and [entry["key"] for entry in shown] == [entry["key"] for entry in expected]
    assert shown[0].keys() == expected[0].keys()


# ---- show


def keys(run: Run, cache: Path) -> list[str]:
    return [entry["key"] for entry in json.loads(run("ls", "--json", "--cache-dir", str(cache)).out)]


def test_show_lists_the_graph_an_operation_a_line_with_inputs_and_outputs_marked(run: Run, cache: Path) -> None:
    out = run("show", keys(run, cache)[0][:12], "--cache-dir", str(cache)).out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "1 conv_fprop image=in1 weight=in2 -> Y=t3 dilation=[1,1] padding=[1,1] stride=[1,1] float" in lines
    assert "2 bias IN_0=t3 IN_1=in4 -> OUT_0=t5 float" in lines
    assert "3 relu IN_0=t5 -> OUT_0=out6 float" in lines
    assert "in1 input 2x8x8x8 512,1,64,8 bfloat16" in lines and "out6 output 2x8x8x8 512,1,64,8 bfloat16" in lines


def test_show_says_how_the_plan_came_about_and_what_its_key_stands_for(run: Run, cache: Path) -> None:
    out = run("show", keys(run, cache)[1], "--cache-dir", str(cache)).out
    for fact in (
        "quality     compiled (built without a GPU",
        "proof       none",
        "workspace ",
        "build time ",
        "KERNEL_CFG",
        "candidates (",
        "  *  ",
    ):
        assert fact in out
    for component in ("signature", "device", "model", "driver", "cudnn", "frontend", "variables", "constraints"):
        assert re.search(rf"^  {component} +[0-9a-f]{{16}}  \S", out, re.MULTILINE)
    assert "by plancache " in out and keys(run, cache)[1] in out


def test_show_json_has_everything_and_digests_that_make_the_key(run: Run, cache: Path) -> None:
    key = keys(run, cache)[1]
    shown = json.loads(run("show", key[:16], "--json", "--cache-dir", str(cache)).out)
    assert shown["key"] == key and shown["recipe"] in shown["candidates"] and shown["proof"] == "none"
    assert [operation["operation"] for operation in shown["operations"]] == ["matmul"]
    assert {tensor["role"] for tensor in shown["tensors"]} == {"input", "output"}
    assert set(shown["timings_s"]) == {"lower", "plan", "build", "serialize"}
    digest = hashlib.sha256(b"plancache-key:1\0")
    for name, component in shown["components"].items():
        digest.update(name.encode() + b"\0" + bytes.fromhex(component["sha256"]))
    assert digest.hexdigest() == key


@pytest.mark.parametrize("prefix", ["zz", ""], ids=["unknown", "ambiguous"])
def test_show_of_no_plan_or_several_is_one_line_with_the_cure(run: Run, cache: Path, prefix: str) -> None:
    result = run("show", prefix, "--cache-dir", str(cache))
    assert result.code == 1 and result.out == "" and is_one_line(result.err)
    assert "plancache ls" in result.err


def test_show_of_an_empty_cache_says_where_it_looked(run: Run, tmp_path: Path) -> None:
    result = run("show", "ab")
    assert result.code == 1 and is_one_line(result.err) and str(tmp_path / "cache") in result.err


# ---- warm


def test_warm_prints_each_graph_as_it_is_planned_and_a_summary(warming: Result) -> None:
    rows = warming.out.splitlines()
    assert rows[0] == "a word of the program's own" and rows[1].split() == ["#", "ORIGIN", "MS", "ENGINE", "GRAPH"]
    assert re.fullmatch(r" +1  built +[\d.]+  eng\d+ +conv_bias_relu-2x8x8x8-8x8x3x3-p1s1d1-bfloat16", rows[2])
    assert re.fullmatch(r" +2  built +[\d.]+  eng\d+ +matmul \[1x32x32, 1x32x32\] bfloat16", rows[3])
    assert re.fullmatch(r"2 graphs for NVIDIA H200 in [\d.]+ s: 2 built; .*/cache", rows[-1])
    assert warming.code == 0 and warming.err == ""


def test_warm_again_finds_the_plans_and_its_json_is_free_of_the_programs_words(run: Run, cache: Path) -> None:
    result = run("warm", "warmable:two", "--device", "h200", "--json", "--cache-dir", str(cache))
    shown = json.loads(result.out)
    assert result.code == 0 and "a word of the program's own" in result.err
    assert [graph["origin"] for graph in shown["graphs"]] == ["local", "local"]
    assert [graph["key"] for graph in shown["graphs"]] == keys(run, cache)


def test_warm_goes_on_after_a_graph_that_has_no_plan_and_exits_with_1(run: Run, cache: Path) -> None:
    result = run("warm", "warmable:some_bad", "--device", "h200", "--cache-dir", str(cache))
    rows = result.out.splitlines()
    assert [row.split()[1] for row in rows if re.match(r" +\d", row)] == ["failed", "failed", "failed", "local"]
    assert "first check that failed: is_supported_datatype" in rows[2] and "the graph is empty" in rows[4]
    assert rows[6].strip() == "as number 2"
    assert result.code == 1 and "3 failed, 1 local" in rows[-1]


def test_warm_takes_the_path_of_a_device_file(run: Run, cache: Path, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(Device.from_file("h200").to_json())
    assert "2 local" in run("warm", "warmable:two", "--device", str(file), "--cache-dir", str(cache)).out


@pytest.mark.parametrize(
    ("target", "cure"),
    [
        ("warmable", "package.module:function"),
        ("warmable:", "package.module:function"),
        ("nowhere.module:f", "install it"),
        ("warmable:tow", "did you mean two?"),
        ("warmable:number", "give one that yields graphs"),
        ("warmable:empty", "yield cudnn.pygraph"),
        ("warmable:nothing", "let it yield graphs"),
        ("warmable:words", "yield cudnn.pygraph"),
        ("warmable:needs", "missing 1 required positional argument: 'argument'"),
        ("warmable:breaks", "no shapes today"),
        ("needs_another:f", "No module named 'nonsuch'"),
        ("leaves:f", "SystemExit"),
    ],
)
def test_warm_of_a_bad_target_is_one_line_with_the_cure_and_exits_with_2(
    run: Run, folder: Path, cache: Path, target: str, cure: str
) -> None:
    (folder / "needs_another.py").write_text("import nonsuch")
    (folder / "leaves.py").write_text("raise SystemExit(0)")
    result = run("warm", target, "--device", "h200", "--cache-dir", str(cache))
    assert result.code == 2 and is_one_line(result.err), result.err
    assert cure in result.err


@pytest.mark.parametrize(("arguments", "cure"), [((), "or --device FILE"), (("--device", "h300"), "the package ships h200")])
def test_warm_without_a_device_is_one_line_with_the_cure_and_exits_with_1(folder: Path, arguments: tuple[str, ...], cure: str) -> None:
    result = program("warm", "warmable:two", *arguments, cwd=folder, CUDA_VISIBLE_DEVICES="")
    assert result.code == 1 and result.out == "" and is_one_line(result.err)
    assert cure in result.err


def test_warm_for_a_device_file_of_another_cudnn_says_so_once(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    file.write_text(Device.from_file("h200").to_json().replace('"cudnn_version": 9', '"cudnn_version": 8'))
    result = run("warm", "warmable:two", "--device", str(file))
    assert result.code == 1 and is_one_line(result.err) and "doctor --write-device" in result.err


def test_warm_interrupted_exits_with_130(run: Run, cache: Path) -> None:
    result = run("warm", "warmable:interrupted", "--device", "h200", "--cache-dir", str(cache))
    assert result.code == 130 and result.err == "plancache: interrupted\n"


def test_warm_that_cannot_store_says_so_once_and_exits_with_1(folder: Path) -> None:
    result = program("warm", "warmable:two", "--device", "h200", "--cache-dir", "warmable.py", cwd=folder)
    assert result.code == 1 and "2 not stored" in result.out
    assert all(line.startswith("plancache: warning: ") for line in result.err.splitlines()) and "Traceback" not in result.err


def test_warm_of_a_read_only_cache_warns_that_nothing_is_kept(run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANCACHE_MODE", "readonly")
    result = run("warm", "warmable:two", "--device", "h200", "--cache-dir", str(cache))
    assert result.code == 0 and "plancache: warning: the cache is readonly (PLANCACHE_MODE)" in result.err


def test_a_reason_of_many_lines_is_told_in_one() -> None:
    reason = "no engine proposed a plan (the backend declined: for _\n{1}\nWarning: X; Reason: types\nWarning: X; Reason: status\n)"
    assert first_line(reason) == "no engine proposed a plan; first check that failed: types"
    assert first_line("the graph (of one) is empty") == "the graph (of one) is empty"


# ---- doctor


@pytest.fixture
def healthy(run: Run) -> Run:
    """Skips where this machine has a problem of its own."""
    problems = json.loads(run("doctor", "--json").out)["problems"]
    if problems:
        pytest.skip(f"this machine has problems: {problems}")
    return run


def doctor(run: Run, *arguments: str) -> tuple[int, dict[str, dict[str, object]], list[str]]:
    result = run("doctor", "--json", *arguments)
    shown = json.loads(result.out)
    return result.code, shown, shown["problems"]


def test_doctor_without_a_problem_shows_its_sections_and_exits_with_0(healthy: Run, cache: Path) -> None:
    result = healthy("doctor", "--cache-dir", str(cache))
    assert result.code == 0 and result.err == "" and result.out.endswith("\n\nno problems found\n")
    titles = [line for line in result.out.splitlines() if re.fullmatch(r"[a-zA-Z ]+", line) and not line.startswith(" ")]
    assert titles[:6] == ["versions", "libraries", "device", "building without a GPU", "store", "environment"]
    assert re.search(r"^  libcudnn_ops +[0-9a-f]{12}  /.*/libcudnn_ops\.so\.9$", result.out, re.MULTILINE)
    assert re.search(rf"^  directory +{re.escape(str(cache))} \(--cache-dir\)$", result.out, re.MULTILINE)


def test_doctor_json_has_the_same_facts(healthy: Run, cache: Path) -> None:
    code, shown, _ = doctor(healthy, "--cache-dir", str(cache))
    assert code == 0 and shown["store"]["entries"] == 2 and shown["store"]["revision"] == HEAD
    assert shown["libraries"]["libcudnn"].keys() == {"path", "build_id"}  # type: ignore[attr-defined]
    assert shown["versions"]["cudnn"] >= 90000  # type: ignore[operator]


def test_doctor_does_not_import_torch(folder: Path) -> None:
    code = "import sys; from plancache.cli import main; main(['doctor']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=clean_environment(), capture_output=True, cwd=folder, check=False)
    assert done.returncode == 0


def test_doctor_where_cudnn_cannot_be_imported_says_what_is_there_and_the_cure(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cudnn").mkdir()
    (tmp_path / "cudnn" / "__init__.py").write_text("raise ImportError('no compiled module')")
    result = program("doctor", cwd=folder, PYTHONPATH=str(tmp_path))
    assert result.code == 1 and result.err == ""
    assert re.search(r"^  libcudnn +not loaded, in the installed packages: /.*/libcudnn\.so\.9$", result.out, re.MULTILINE)
    assert re.search(
        r"^problem: cuDNN cannot be used \(libcudnn is at /.*\): .*no compiled module.*pip install nvidia-cudnn-frontend$", result.out, re.M
    )
    assert f"problem: {tmp_path}/cudnn/__init__.py hides the installed nvidia-cudnn-frontend" in result.out


def test_doctor_where_libcudnn_cannot_be_loaded_names_it_and_the_other_one(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "libcudnn.so.9").write_text("not a library")
    result = program("doctor", cwd=folder, LD_LIBRARY_PATH=str(tmp_path))
    assert result.code == 1 and result.err == ""
    assert f"{tmp_path}/libcudnn.so.9" in next(line for line in result.out.splitlines() if line.startswith("problem: cuDNN cannot be used"))
    assert "problem: several libcudnn are in reach" in result.out


def test_one_library_under_several_names_is_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "libfake.so.9.1").write_text("")
    (tmp_path / "libfake.so.9").symlink_to("libfake.so.9.1")
    assert [(Path(found.path).parent, found.through) for found in search(r"libfake\.so[.\d]*")] == [(tmp_path, "LD_LIBRARY_PATH")]


@pytest.mark.parametrize(
    ("name", "cure"), [("PLANCACHE_DRI", "did you mean PLANCACHE_DIR?"), ("PLANCACHE_ZZZZ", "unset it, or use one of PLANCACHE_BUILD")]
)
def test_doctor_knows_a_misspelt_variable(healthy: Run, monkeypatch: pytest.MonkeyPatch, name: str, cure: str) -> None:
    monkeypatch.setenv(name, "1")
    code, shown, problems = doctor(healthy)
    assert code == 1 and shown["environment"][name] == "1"
    assert len(problems) == 1 and problems[0].startswith(f"{name} is not") and cure in problems[0]


def test_doctor_shows_variables_that_change_results_and_goes_on_after_a_wrong_setting(
    healthy: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("PLANCACHE_STRICT", "maybe")
    code, shown, problems = doctor(healthy)
    assert code == 1 and shown["environment"]["NVIDIA_TF32_OVERRIDE"] == "0"
    assert problems == ["PLANCACHE_STRICT='maybe' must be 1 or 0"]


def test_doctor_finds_a_directory_that_others_may_write(healthy: Run, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    code, shown, problems = doctor(healthy, "--cache-dir", str(tmp_path))
    assert code == 1 and shown["store"]["permissions"] == "0777"
    assert len(problems) == 1 and f"chmod go-w {tmp_path}" in problems[0]


def test_doctor_finds_a_file_in_the_place_of_the_directory(healthy: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, problems = doctor(healthy, "--cache-dir", str(tmp_path / "file"))
    assert code == 1 and len(problems) == 1 and "is not a directory" in problems[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_doctor_finds_a_directory_that_cannot_be_made(healthy: Run, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    code, _, problems = doctor(healthy, "--cache-dir", str(tmp_path / "cache"))
    assert code == 1 and len(problems) == 1 and f"{tmp_path} is not writable" in problems[0]


def test_doctor_finds_a_database_of_another_version(healthy: Run, tmp_path: Path) -> None:
    file = Settings.load(directory=tmp_path).database
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
    connection.execute("INSERT INTO alembic_version VALUES ('9999_later')")
    connection.commit()
    connection.close()
    code, shown, problems = doctor(healthy, "--cache-dir", str(tmp_path))
    assert code == 1 and shown["store"]["revision"] == "9999_later" and len(problems) == 1 and "9999_later" in problems[0]


def test_doctor_finds_a_database_that_is_none(healthy: Run, tmp_path: Path) -> None:
    file = Settings.load(directory=tmp_path).database
    file.write_bytes(b"no database" * 1000)
    code, _, problems = doctor(healthy, "--cache-dir", str(tmp_path))
    assert code == 1 and len(problems) == 1 and f"mv {file}" in problems[0]


@pytest.mark.skipif(driver_library() is not None, reason="with the driver's library no compiler is needed")
def test_doctor_finds_that_nothing_can_be_built_without_a_compiler(healthy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CC", raising=False)
    code, shown, problems = doctor(healthy)
    assert code == 1 and shown["building_without_a_gpu"]["possible"] is False and "apt-get install gcc" in problems[0]


# ---- doctor: the device


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    """An H200 that says it is here."""
    file = Device.from_file("h200")
    device = Device(file.properties, file.cudnn_version, 0)
    monkeypatch.setattr(Device, "current", lambda *_: device)
    monkeypatch.setattr(Device, "described", lambda _: file)
    return file


@pytest.mark.usefixtures("gpu")
def test_doctor_shows_the_gpu(healthy: Run) -> None:
    _, shown, _ = doctor(healthy)
    assert shown["device"]["gpu"] == "NVIDIA H200" and shown["device"]["compute_capability"] == 90
    assert shown["device"]["memory_bytes"] > 100e9  # type: ignore[operator]
    assert "NVIDIA H200 (CUDA device 0)" in healthy("doctor").out


def test_doctor_holds_a_gpu_that_was_named_and_is_not_there_for_a_problem(healthy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def current(ordinal: int | None = None) -> Device:
        raise DeviceError(f"no CUDA device {ordinal}")

    monkeypatch.setattr(Device, "current", current)
    assert doctor(healthy)[0] == 0
    code, _, problems = doctor(healthy, "--device-ordinal", "3")
    assert code == 1 and "no CUDA device 3" in problems[0]


def test_doctor_finds_a_gpu_that_cudnn_cannot_use(healthy: Run, gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def described(device: Device) -> Device:
        raise DeviceError(f"cuDNN cannot tell the properties of {device.model}")

    monkeypatch.setattr(Device, "described", described)
    code, _, problems = doctor(healthy)
    assert code == 1 and len(problems) == 1 and f"cuDNN cannot tell the properties of {gpu.model}" in problems[0]


def test_write_device_writes_a_file_that_reads_back_and_overwrites_none_unasked(run: Run, gpu: Device, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    assert run("doctor", "--write-device", str(file)).code == 0
    written = file.read_text()
    assert Device.from_file(file).properties == gpu.properties
    refused = run("doctor", "--write-device", str(file))
    assert refused.code == 1 and is_one_line(refused.err) and "--force" in refused.err
    file.write_text("")
    assert run("doctor", "--write-device", str(file), "--force").code == 0 and file.read_text() == written


@pytest.mark.usefixtures("gpu")
def test_write_device_wants_the_folder_to_exist(run: Run, tmp_path: Path) -> None:
    result = run("doctor", "--write-device", str(tmp_path / "new" / "gpu.json"))
    assert result.code == 1 and is_one_line(result.err) and f"mkdir -p {tmp_path / 'new'}" in result.err


def test_write_device_without_a_gpu_writes_nothing(folder: Path, tmp_path: Path) -> None:
    result = program("doctor", "--write-device", str(tmp_path / "gpu.json"), cwd=folder, CUDA_VISIBLE_DEVICES="")
    assert result.code == 1 and is_one_line(result.err) and not (tmp_path / "gpu.json").exists()


# ---- tables


def test_a_table_is_aligned_and_gives_way_in_one_column_only() -> None:
    rows = [("a", "a text that is long enough to be cut", "1"), ("bcd", "short", "10")]
    text = tables.table(("name", "text", ">count"), rows)
    assert text.splitlines()[2] == "bcd   short                                    10"
    narrow = tables.table(("name", "text", ">count"), rows, width=36, shrink=1)
    assert narrow.splitlines()[1] == "a     a text that is long en…      1"
    assert max(map(len, narrow.splitlines())) == 36


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (tables.size(0), "0 B"),
        (tables.size(999), "999 B"),
        (tables.size(1659), "1.66 kB"),
        (tables.size(999_999), "1.00 MB"),
        (tables.size(141_375), "141 kB"),
        (tables.size(5e15), "5.00e+03 TB"),
        (tables.milliseconds(0.00041), "0.4"),
        (tables.milliseconds(1.4450), "1445"),
        (tables.duration(-1), "0 s"),
        (tables.duration(59.9), "59 s"),
        (tables.duration(3599), "59 min"),
        (tables.duration(200_000), "2 d"),
        (version_text(91900), "9.19.0"),
        (version_text(90101), "9.1.1"),
        (cuda_version(12080), "12.8"),
        (tables.engine("eng7_k24=21"), "eng7"),
        (tables.engine("eng0"), "eng0"),
        (tables.engine("frost_sdpa"), "frost_sdpa"),
    ],
)
def test_numbers_are_shown_with_few_digits_and_their_units(shown: str, expected: str) -> None:
    assert shown == expected
