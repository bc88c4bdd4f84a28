"""Builds and registers the second device, once per process. Needs a C++ compiler and takes half a minute the first
time; the result is kept beside the environment.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "hold"
SOURCE = Path(__file__).with_name("device.cpp")


def _library() -> Path:
    """The compiled device for this torch and this Python."""
    made_of = SOURCE.read_bytes() + torch.__version__.encode() + sys.version.encode()
    directory = Path(sys.prefix) / "second-device"
    target = directory / f"hold_device_{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if target.exists():
        return target
    directory.mkdir(exist_ok=True)
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = Path(torch.__file__).parent / "lib"
    with tempfile.NamedTemporaryFile(dir=directory, suffix=".so", delete=False) as file:
        command = [
            *(os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-shared", "-fPIC", "-w"),
            *("-DTORCH_EXTENSION_NAME=hold_device", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
            *(f"-I{path}" for path in includes),
            *(str(SOURCE), "-o", file.name),
            *(f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python", f"-Wl,-rpath,{libraries}"),
        ]
        subprocess.run(command, check=True, timeout=600)
    os.replace(file.name, target)
    return target


def register() -> torch.device:
    """The device; registering it again does nothing."""
    if not hasattr(torch, NAME):
        torch.utils.rename_privateuse1_backend(NAME)
        spec = importlib.util.spec_from_file_location("hold_device", _library())
        assert spec is not None and spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        torch._register_device_module(NAME, _module())
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=False)
    return torch.device(NAME, 0)


def _module() -> Any:
    """What torch asks a device's module for."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=0: torch.zeros(1, dtype=torch.uint8)
    module.set_rng_state = lambda state, device=0: None
    module.get_amp_supported_dtype = list
    return module
