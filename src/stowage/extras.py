"""Optional packages: which pip extra provides a module, and the command that installs it.

Stowage alone brings what its plugin needs inside of vLLM, and what looks after directories of chunks. What computes is
an extra, so that nobody's Transformers or hub client is moved by installing the plugin.
"""

from __future__ import annotations

from importlib.util import find_spec

from stowage.errors import ConfigError

EXTRA_OF = {
    **dict.fromkeys(("torch", "transformers", "huggingface_hub", "safetensors", "tokenizers", "jinja2"), "engine"),
    "prometheus_client": "engine",
    "starlette": "server",
    "uvicorn": "server",
    "llguidance": "grammar",
    "obstore": "object",
    "redis": "valkey",
    "cryptography": "encryption",
}
"""The extra of each module that the package alone does not bring."""


def require(extra: str, what: str) -> None:
    """Raise ConfigError with pip's command if a module of ``extra`` cannot be found; ``what`` needs it.

    Nothing is imported to find out.
    """
    lacking = [name for name, its in EXTRA_OF.items() if its == extra and find_spec(name) is None]
    if lacking:
        raise ConfigError(f"{what} needs {' and '.join(lacking)}. Way out: pip install 'stowage[{extra}]'")


def absent(error: ImportError) -> ConfigError | None:
    """What to tell a user of an import that failed because an extra is missing; ``None`` if it failed otherwise."""
    module = (error.name or "").partition(".")[0]
    extra = EXTRA_OF.get(module)
    if extra is None or find_spec(module) is not None:
        return None
    return ConfigError(f"This needs {module}, which is not installed. Way out: pip install 'stowage[{extra}]'")
