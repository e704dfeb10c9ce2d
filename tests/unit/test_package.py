"""What an installation has beside the code, and the command's first words."""

import resource
import subprocess
import sys
import sysconfig
import venv
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


PAGES = ["tracking/page.html", "serving/http/page.html"]


@pytest.mark.parametrize("file", ["py.typed", "__main__.py", "launcher/command.py", "csrc/decode.cpp", *PAGES])
def test_a_wheel_has(file: str, wheel: Path) -> None:
    assert (wheel / "megakv" / file).is_file()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a wheel, put together anew."""
    folder = tmp_path_factory.mktemp("wheel")
    said("setup.py", "-q", "build_py", "--build-lib", folder)
    return folder


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_wheel_brings_its_kernels(tmp_path: Path) -> None:
    """Installed beside the same libraries where there is no compiler, it reads with kernels of its own."""
    said("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    (libraries,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (libraries / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    environ = {"PATH": str(python.parent), "HOME": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    loads = "from megakv.base.library import library; print(library('prefill'), library('step'))"
    (tmp_path / "prompt").write_text("aa")
    run = ["run", ROOT / "recipes/passkey/model", *"--prompt-file prompt --max-new-tokens 2 --dtype fp32".split()]
    for words in (["-m", "pip", "install", "-q", "--no-deps", wheel], ["-c", loads], ["-m", "megakv", *run]):
        done = subprocess.run([python, *words], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        if words[0] == "-c":
            assert all(name.startswith(str(libraries)) for name in done.stdout.split()), done.stdout
    assert not any((tmp_path / "extensions").glob("**/*.so"))


def test_engines_and_commands_do_without_a_server() -> None:
    script = "import megakv.engine.build, megakv.serving.loop, megakv.launcher.run, megakv.launcher.chat, sys\n"
    script += "print({'fastapi', 'uvicorn', 'openai', 'prometheus_client'} & set(sys.modules))"
    assert said("-c", script).splitlines()[-1] == "set()"
