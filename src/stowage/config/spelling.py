"""How a message names a setting: as it was given, by a flag, a variable, or a key in a file.

Messages are written with the names of ``Memory`` and its neighbours, which know no command line. Whoever shows one to a
person passes it through ``spelled``. Names of one word are English, too: they are taken for settings only where a
value, or what the setting is, follows.
"""

import re
from collections.abc import Iterable, Mapping

ENVIRONMENT_PREFIX = "STOWAGE_"
_NOT_BEFORE = r"(?<![\w./'\"`=:-])"
_NOT_AFTER = r"(?![\w=(/:-]|\.\w)"
_BEGINS = r"(?:^|(?<=[.,:] )|(?<=leave )|(?<=and )|(?<=but )|(?<=[Gg]ive ))"


def flag_of(name: str) -> str:
    """``--host-memory`` for ``host_memory``."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """``STOWAGE_HOST_MEMORY`` for ``host_memory``."""
    return ENVIRONMENT_PREFIX + name.upper()


def spelled(text: str, given: Mapping[str, str]) -> str:
    """``text`` with each setting (``host_memory``, or ``--host-memory``) called as ``given`` says."""

    def name_of(match: re.Match[str]) -> str:
        found = match["flag"] or match["name"] or match["value"] or match["word"]
        return given[found.replace("-", "_")]

    return _pattern(given).sub(name_of, text)


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    flags = "|".join(name.replace("_", "-") for name in longest_first)
    parts = "|".join(name for name in longest_first if "_" in name)
    words = "|".join(name for name in longest_first if "_" not in name)
    return re.compile(
        rf"{_NOT_BEFORE}(?:--(?P<flag>{flags}){_NOT_AFTER}|(?:[Tt]he )?(?P<name>{parts}){_NOT_AFTER}"
        rf"|(?:[Tt]he )?(?P<value>{words})(?= ['\"])"
        rf"|{_BEGINS}(?P<word>{words})(?= (?:is|has|must|out|and|a)\b))"
    )
