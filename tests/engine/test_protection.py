"""An engine whose disk is protected: the same answers, nothing readable left behind, and keys that come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from stowage.storage import key_file
from tests.engine.conftest import assert_same, greedy, random_prompt

PROMPT_TOKENS = 400


@pytest.mark.parametrize("method", ["blake3", "aes-256-gcm"])
def test_a_protected_disk_changes_no_answer(method, engines, references, tmp_path: Path):
    file = tmp_path / "keys"
    key_file.make(file)
    memory = {
        "host_memory": "32MiB",
        "disk": f"{tmp_path / 'cache'}:64MiB",
        "disk_protection": method,
        "disk_key_file": str(file),
    }
    prompt = random_prompt(PROMPT_TOKENS)
    expected = references("llama").answer(prompt, 16)

    def ask(**options: str) -> int:
        """Tokens that came from the disk, in an engine that has just been started."""
        engine = engines("llama", **memory | options)
        (completion,) = engine.generate([prompt], greedy(16))
        assert_same(completion, expected)
        assert completion.reused_tokens["disk"] == sum(completion.reused_tokens.values())
        assert engine.flush()
        engine.close()
        return completion.reused_tokens["disk"]

    assert ask() == 0
    stored = ask()
    assert stored >= PROMPT_TOKENS - 64
    first = key_file.read(file)[0]
    key_file.rotate(file)
    assert ask() == stored, "protection is no part of a chunk's key, and the old secret still reads"
    key_file.drop(file, first.id.hex())
    assert ask() == 0
    assert ask() == stored
    assert ask(disk_protection="checksum", disk_key_file="") == 0, "no key, no hit; and no failure"
