"""What an installation has beside the code, and the command's first words."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

import megakv

ROOT = Path(__file__).resolve().parents[2]


def said(*words: str | Path) -> str:
    """What a python process prints."""
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_version_has_one_home() -> None:
    assert said("-m", "megakv", "--version") == f"megakv {megakv.__version__}\n"
    assert said("setup.py", "--version").splitlines()[-1] == megakv.__version__
    assert f"\n## {megakv.__version__}, " in (ROOT / "CHANGELOG.md").read_text()


def test_help_takes_less_than_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert said("-m", "megakv", "--help").startswith("usage: megakv ")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


@pytest.mark.parametrize("file", ["py.typed", "__main__.py", "launcher/command.py", "csrc/decode.cpp"])
def test_a_wheel_has(file: str, wheel: Path) -> None:
    assert (wheel / "megakv" / file).is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a wheel, put together anew."""
    folder = tmp_path_factory.mktemp("wheel")
    said("setup.py", "-q", "build_py", "--build-lib", folder)
    return folder


def test_engines_and_commands_do_without_a_server() -> None:
    script = "import megakv.engine.build, megakv.serving.loop, megakv.launcher.run, megakv.launcher.chat, sys\n"
    script += "print({'fastapi', 'uvicorn', 'openai', 'prometheus_client'} & set(sys.modules))"
    assert said("-c", script).splitlines()[-1] == "set()"
