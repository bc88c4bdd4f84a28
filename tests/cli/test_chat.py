"""``stowage chat`` with lines from a pipe."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Stowage

FLAGS = ["--max-new-tokens", "4", "--kv-cache-memory", "8MiB", "--json"]


def test_turns_build_on_one_another_and_reset_forgets(call: Stowage, tiny_llama: Path) -> None:
    line = "what lies in the second hold of this ship, and why does it lie there and not in the first one?"
    result = call("chat", tiny_llama, *FLAGS, stdin=f"{line}\n\n{line}\n/reset\n{line}\n")
    first, second, again = (json.loads(text) for text in result.stdout.splitlines())
    assert second["prompt_tokens"] > 2 * len(line) > first["prompt_tokens"]
    assert second["reused_tokens"]["device"] >= 64
    assert again["prompt_tokens"] == first["prompt_tokens"] and again["token_ids"] == first["token_ids"]


def test_system_message_comes_first(call: Stowage, tiny_llama: Path) -> None:
    plain, told = (
        json.loads(call("chat", tiny_llama, *FLAGS, *extra, stdin="hello\n").stdout)["prompt_tokens"]
        for extra in ([], ["--system", "be brief"])
    )
    assert told == plain + len("<be brief") - len("<") + 1


def test_quit_and_end_of_input_end_it(call: Stowage, tiny_llama: Path) -> None:
    for stdin in ("/quit\nnever asked\n", ""):
        result = call("chat", tiny_llama, *FLAGS, stdin=stdin)
        assert result.exit_code == 0 and result.stdout == ""


def test_commands_are_not_sent(call: Stowage, tiny_llama: Path) -> None:
    result = call("chat", tiny_llama, *FLAGS, stdin="/help\n/?\n/clear\n/home/x is a path\n")
    assert len(result.stdout.splitlines()) == 1, "the path is a message"
    assert result.stderr.count("/reset forgets the conversation, /quit or Ctrl-D ends it.") == 3
    assert "/clear is no command, and was not sent." in result.stderr


def test_a_model_without_a_template_is_told(call: Stowage, tiny_llama: Path, tmp_path: Path) -> None:
    for path in tiny_llama.iterdir():
        if path.suffix != ".jinja":
            text = path.read_bytes()
            (tmp_path / path.name).write_bytes(text)
    result = call("chat", tmp_path, *FLAGS, stdin="hello\n")
    assert result.exit_code == 2 and "chat template" in result.stderr


def test_run_without_a_prompt_opens_the_conversation(
    call: Stowage, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal; from a pipe it asks for a prompt, and so does --raw."""
    assert "There is no prompt" in call("run", tiny_llama, *FLAGS, stdin="hello\n").stderr
    monkeypatch.setattr("stowage.cli.run._in_a_terminal", lambda: True)
    talked = call("run", tiny_llama, *FLAGS, stdin="hello\nhello\n/quit\nnever\n")
    first, second = (json.loads(line)["prompt_tokens"] for line in talked.stdout.splitlines())
    assert talked.exit_code == 0 and second > first
    assert "There is no prompt" in call("run", tiny_llama, *FLAGS, "--raw", stdin="hello\n").stderr
