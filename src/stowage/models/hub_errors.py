"""Messages for a model that could not be downloaded from the hub: what failed, why, and what to do.

The hub's client wraps errors in errors, and says most of what happened in the innermost. Owns the sentences.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path

import httpx
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

from stowage.config.disk_room import DISK_FULL, why_not_written
from stowage.errors import first_line

TROUBLES = (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError, RuntimeError)
"""What the hub's client raises; its downloader raises plain ``RuntimeError``."""
_REASON_CHARACTERS = 120
_BEFORE = "to use what was downloaded before set HF_HUB_OFFLINE=1"
_STATUS = {
    401: (
        "does not take the key that it was given",
        "Set HF_TOKEN to one of huggingface.co/settings/tokens, or to none",
    ),
    403: ("does not let this account have it", "Set HF_TOKEN to a key of an account that may"),
    429: ("has been asked too often", "Wait for some minutes, or set HF_TOKEN, which allows more"),
}
_DISK = DISK_FULL | {errno.EROFS, errno.EACCES, errno.EPERM}


def why_not(name: str, error: BaseException) -> str:
    """Sentences of why the hub did not give ``name``, and what to do."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and it was not downloaded before. Unset HF_HUB_OFFLINE to download it."
    host = constants.ENDPOINT.partition("://")[2]
    for say in (_of_name, _of_status, _of_network, _of_disk):
        for found in _chain(error):
            if told := say(found, host, name):
                return told
    return f"its client says: {_short(error)}. Check the network; {_BEFORE}."


def _of_name(found: BaseException, host: str, name: str) -> str:
    if isinstance(found, HFValidationError):
        return "that is no name of a model there. Check the spelling: ids are ORG/NAME, as Qwen/Qwen3-0.6B."
    if isinstance(found, GatedRepoError):
        page = f"{host}/{name.partition(':')[0]}"
        return f"its owner wants you to agree to terms. Do so at {page}, and set HF_TOKEN to a key of your account."
    if isinstance(found, RepositoryNotFoundError):
        return f"{host} has no such model, or a private one. Check the spelling; for a private model set HF_TOKEN."
    if isinstance(found, RemoteEntryNotFoundError):
        return "it holds no config.json, so it is no checkpoint of Transformers. Check the spelling, and its page."
    return ""


def _of_status(found: BaseException, host: str, _name: str) -> str:
    if not isinstance(found, httpx.HTTPStatusError | HfHubHTTPError) or found.response is None:
        return ""
    status = found.response.status_code
    if status in _STATUS:
        why, do = _STATUS[status]
        return f"{host} {why} (status {status}). {do}; {_BEFORE}."
    return f"{host} answers with an error of its own (status {status}). Try again later; {_BEFORE}."


def _of_network(found: BaseException, host: str, _name: str) -> str:
    if not isinstance(found, httpx.TransportError):
        return ""
    why = re.sub(r"^\[Errno -?\d+\] ", "", _short(found))
    return f"{host} cannot be reached ({why}). Check the network and HTTPS_PROXY; {_BEFORE}."


def _of_disk(found: BaseException, _host: str, _name: str) -> str:
    if not isinstance(found, OSError) or found.errno not in _DISK:
        return ""
    why = why_not_written(Path(constants.HF_HOME), found)
    return f"it cannot be written below {constants.HF_HOME}: {why}. Set HF_HOME to a directory with room."


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in chain:
        chain.append(found)
        found = found.__cause__ or found.__context__
    return chain


def _short(error: BaseException) -> str:
    return first_line(error)[:_REASON_CHARACTERS].rstrip(". ")
