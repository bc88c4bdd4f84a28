"""Stand-ins for the CUDA libraries that a CUDA build of torch is linked with, for a machine without a GPU.

    python scripts/cuda_stand_ins.py .pythons/3.13/lib/python3.13/site-packages/torch

The package index has CUDA builds of torch only, and their libraries are gigabytes that a machine without a GPU never
calls. With ``pip install --no-deps torch`` and libraries that have the names and nothing else, torch computes on the
CPU as its CPU build does. Functions answer 100, which CUDA means by "no device", but for those that say what a number
means, and whether a stream is being captured: none is. Needs gcc and binutils.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

VENDORS = re.compile(r"lib(cu|nv|nccl)")
"""Names of libraries that come from NVIDIA."""
THEIRS = re.compile(r"_*(cu|nv|nccl)\w*")
"""Names of functions in them, where an import does not say from which library."""
TELLS = re.compile(r"Get(Error|Status|Last)\w*(String|Name)")
CAPTURES = "cudaStreamIsCapturing"


def run(*command: str | Path) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


class Wanted:
    """What the libraries in one folder want of others: names of libraries, versions of each, functions by version."""

    def __init__(self, folder: Path) -> None:
        libraries = [path for path in folder.iterdir() if path.is_file() and re.search(r"\.so(\.|$)", path.name)]
        self.libraries: set[str] = set()
        self.versions: dict[str, set[str]] = defaultdict(set)
        self.functions: dict[str, set[str]] = defaultdict(set)
        defined: set[str] = set()
        for library in libraries:
            self.libraries |= set(re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-dW", library)))
            file = ""
            for kind, name in re.findall(r"(File|Name): (\S+)", run("readelf", "-VW", library)):
                if kind == "File":
                    file = name
                else:
                    self.versions[file].add(name)
            for line in run("nm", "-D", library).splitlines():
                *_, kind, symbol = line.split()
                name, _, version = symbol.partition("@")
                (self.functions[version.strip("@")] if kind in "Uwv" else defined).add(name)
        self.libraries -= {path.name for path in libraries}
        versioned = set().union(*(self.functions[v] for versions in self.versions.values() for v in versions))
        plain = self.functions[""] - defined - versioned
        self.plain = {name for name in plain if THEIRS.fullmatch(name)}


def function(name: str) -> str:
    """Its definition in C."""
    if name == CAPTURES:
        return f"int {name}(void *stream, int *status) {{ *status = 0; return 0; }}\n"
    if TELLS.search(name):
        return f'const char *{name}(void) {{ return "no device"; }}\n'
    return f"int {name}(void) {{ return 100; }}\n"


def write(folder: Path) -> list[str]:
    """Put the stand-ins into ``folder``, in place of earlier ones; their names."""
    for earlier in folder.iterdir():
        if VENDORS.match(earlier.name):
            earlier.unlink()
    wanted = Wanted(folder)
    lacking = sorted(name for name in wanted.libraries if VENDORS.match(name))
    with tempfile.TemporaryDirectory() as scratch:
        for library in lacking:
            versions = {version: wanted.functions[version] for version in sorted(wanted.versions[library])}
            names = sorted(set().union(*versions.values()) if versions else wanted.plain)
            source, script = Path(scratch) / "library.c", Path(scratch) / "versions"
            source.write_text("".join(map(function, names)))
            nodes = (
                f"{version} {{ global: {' '.join(f'{n};' for n in sorted(own))} }};"
                for version, own in versions.items()
            )
            script.write_text("\n".join(nodes))
            flags = [f"-Wl,--version-script={script}"] if versions else []
            run(
                "gcc",
                "-w",
                "-fno-builtin",
                "-shared",
                "-fPIC",
                f"-Wl,-soname,{library}",
                *flags,
                "-o",
                folder / library,
                source,
            )
    return lacking


if __name__ == "__main__":
    print(*write(Path(sys.argv[1]) / "lib"))
