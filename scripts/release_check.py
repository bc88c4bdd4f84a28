"""Builds what would be published, and checks it: `make release-check`, with `URL=https://...` of the repository.

Owns a copy of the committed tree: links of README lead to ``URL`` in it, and the metadata names it. From the copy come
a complete sdist and, out of that sdist alone, a manylinux wheel. twine reads both; the wheel is installed into a fresh
environment, which sees the packages of this one, and does there what a user would do first.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".release-tools"
COMPLETE = ("tests/unit/test_docs.py", "docs/quickstart.md", "Makefile", "requirements/runtime.txt", "CHANGELOG.md")
LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)]+)(\))")
START_S = 120.0


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What it printed. Ends this program with its output if it fails."""
    env = {**os.environ, "PYTHONPATH": str(TOOLS), **environment}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def copied(into: Path, url: str) -> Path:
    """The committed tree, as it is published from ``url``."""
    tree = into / "tree"
    archive = into / "tree.tar"
    run("git", "archive", "--output", archive, "HEAD", cwd=ROOT)
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="data")
    if url:
        readme, project = tree / "README.md", tree / "pyproject.toml"
        readme.write_text(LINK.sub(rf"\g<1>{url}/blob/main/\2\3", readme.read_text()))
        links = f'Source = "{url}"\nDocumentation = "{url}/tree/main/docs"\nChangelog = "{url}/blob/main/CHANGELOG.md"'
        project.write_text(project.read_text() + f"\n[project.urls]\n{links}\n")
    return tree


def built(tree: Path, into: Path) -> tuple[Path, Path]:
    """Sdist and wheel. The wheel is made of the sdist, and can be installed on other Linux distributions."""
    run(sys.executable, "-m", "build", "--no-isolation", "--sdist", "--outdir", into / "dist", tree, cwd=into)
    (sdist,) = (into / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(into / "unpacked", filter="data")
    (source,) = (into / "unpacked").iterdir()
    lacking = [name for name in COMPLETE if not (source / name).is_file()]
    if lacking:
        sys.exit(f"the sdist lacks {', '.join(lacking)}: see MANIFEST.in")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", into / "plain", source, cwd=into)
    (plain,) = (into / "plain").glob("*.whl")
    path = f"{TOOLS / 'bin'}:{os.environ['PATH']}"
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", into / "dist", plain, cwd=into, PATH=path)
    (wheel,) = (into / "dist").glob("*.whl")
    if "manylinux" not in wheel.name:
        sys.exit(f"{wheel.name} is no manylinux wheel: was the C extension built?")
    with zipfile.ZipFile(wheel) as packed:
        if not any(name.endswith(".so") for name in packed.namelist()):
            sys.exit(f"{wheel.name} has no compiled code: is there a C compiler?")
    return sdist, wheel


def installed(wheel: Path, into: Path) -> Path:
    """``bin`` of a fresh environment with the wheel, which sees the packages of this one but no checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", into / "venv", cwd=into)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = into / "venv" / "lib" / version / "site-packages"
    target = ("--target", packages, "--python-version", f"{sys.version_info.major}.{sys.version_info.minor}")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps")
    run(*pip, *target, "--only-binary", ":all:", wheel, cwd=into)
    (packages / "others.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")  # its .pth files are not read
    script = into / "venv" / "bin" / "stowage"
    script.write_text(f"#!{into}/venv/bin/python\nfrom stowage.cli import main\nmain()\n")
    script.chmod(0o755)
    return into / "venv" / "bin"


def tried(bin: Path, into: Path) -> None:
    """What a user does first: a model, an answer, a server, the plugin."""
    python, stowage = bin / "python", bin / "stowage"
    alone = {"PYTHONPATH": "", "HOME": str(into), "HF_HUB_OFFLINE": "1"}
    where = run(python, "-c", "import stowage; print(stowage.__file__)", cwd=into, **alone)
    if str(into) not in where:
        sys.exit(f"the wheel is not what is imported, but {where}")
    run(python, "-c", "import stowage.native._native", cwd=into, **alone)
    hook = "from importlib.metadata import entry_points as all; (it,) = all(group='vllm.general_plugins'); it.load()"
    run(python, "-c", hook, cwd=into, **alone)
    run(stowage, "tiny", "llama", "tiny", cwd=into, **alone)
    answer = run(
        stowage, "run", "tiny", "-p", "Hello", "-n", "4", "--json", "--kv-cache-memory", "4MiB", cwd=into, **alone
    )
    if len(json.loads(answer)["token_ids"]) != 4:
        sys.exit(f"stowage run answered {answer}")
    command = [str(stowage), "serve", "tiny", "--port", "0", "--kv-cache-memory", "4MiB", "--json"]
    server = subprocess.Popen(command, cwd=into, env={**os.environ, **alone}, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        wait_for(url.removesuffix("/v1") + "/health")
    finally:
        server.terminate()
        server.wait(START_S)


def wait_for(url: str) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                if answer.status == 200:
                    return
        except urllib.error.URLError:
            pass
        if time.monotonic() > end:
            sys.exit(f"{url} does not answer")
        time.sleep(0.2)


def main() -> None:
    url = (sys.argv[1] if len(sys.argv) > 1 else "").removesuffix("/").removesuffix(".git")
    with tempfile.TemporaryDirectory() as name:
        into = Path(name)
        sdist, wheel = built(copied(into, url), into)
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=into)
        tried(installed(wheel, into), into)
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        shutil.copytree(into / "dist", ROOT / "dist")
    for file in (sdist, wheel):
        print(f"dist/{file.name}  {(ROOT / 'dist' / file.name).stat().st_size / 1e6:.1f} MB")
    if not url:
        print("To publish them, give URL=https://... of the repository: metadata and links of README lack it.")


if __name__ == "__main__":
    main()
