"""The wheel has all that the package needs, and runs where it alone is installed."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import trustbatch

ROOT = Path(__file__).parents[1]


def run(*command: str, cwd: Path) -> str:
    # without the checkout on the path: it must be the wheel that answers
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([sys.executable, "-m", *build, "-w", str(folder), str(ROOT)], check=True)
    (file,) = folder.iterdir()
    return file


def test_it_has_every_file_of_the_package(wheel: Path) -> None:
    package = ROOT / "src" / "trustbatch"
    expected = {
        str(file.relative_to(ROOT / "src"))
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected == {name for name in names if not name.startswith("trustbatch-")}
    assert {"trustbatch/py.typed", "trustbatch/observe/report.css"} <= names
    assert "trustbatch/observe/charts.js" in names


def test_it_runs_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", str(venv), cwd=tmp_path)
    python = str(venv / "bin" / "python")
    install = ["install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    run(sys.executable, "-m", "pip", "--python", python, *install, cwd=tmp_path)
    # the dependencies are those of this environment; its own trustbatch comes later on the path
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    where = run(python, "-c", purelib, cwd=tmp_path)
    (Path(where) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = str(venv / "bin" / "trustbatch")
    assert run(command, "--version", cwd=tmp_path) == f"trustbatch {trustbatch.__version__}"
    assert "inspect" in run(command, "--help", cwd=tmp_path)
    location = run(python, "-c", "import trustbatch; print(trustbatch.__file__)", cwd=tmp_path)
    assert Path(location).is_relative_to(venv)
