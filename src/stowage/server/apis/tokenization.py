"""`/tokenize` and `/detokenize`, as vLLM and llama-server have them: the tokens of a text or conversation, and back."""

from __future__ import annotations

from typing import Any

from stowage.engine.prompts import Begin, unasked
from stowage.server.api_errors import bad
from stowage.server.apis.chat import chat_tools
from stowage.server.apis.conversation import messages
from stowage.server.apis.reader import Reader
from stowage.server.fields import Fields, parse_object
from stowage.server.vocabulary import Vocabulary


def tokenize(reader: Reader, body: bytes | bytearray, begin: Begin = unasked) -> dict[str, Any]:
    """A text in `prompt` (or llama-server's `content`), or a conversation in `messages`. Raises ApiError."""
    fields = Fields(parse_object(body))
    reader.model(fields, needed=False)
    named = fields.flag("return_token_strs") or fields.flag("with_pieces")
    if fields.given("messages"):
        if fields.given("prompt") or fields.given("content"):
            raise bad("A text and 'messages' exclude each other; give one of them.", "messages")
        options, tools, raw = reader.template_options(fields), chat_tools(fields), fields.take("messages")
        fields.flag("add_special_tokens")
        fields.finish()
        told, template = reader.chat_template.told(messages(raw), tools, options)
        tokens = reader.prompt(told, None, 1, begin, template, param="messages").tokens
    else:
        name = "content" if fields.given("content") and not fields.given("prompt") else "prompt"
        text, special = fields.needed_text(name), fields.flag("add_special_tokens", name == "prompt")
        fields.flag("parse_special")
        fields.finish()
        tokens = reader.tokens(text, begin, add_special_tokens=special) if text else []
    strings = [Vocabulary(reader.tokenizer).text_of(token) for token in tokens] if named else None
    return {"count": len(tokens), "max_model_len": reader.tokens_max, "tokens": tokens, "token_strs": strings}


def detokenize(reader: Reader, body: bytes | bytearray, begin: Begin = unasked) -> dict[str, Any]:
    """The text of `tokens`, with special ones. Raises ApiError."""
    fields = Fields(parse_object(body))
    reader.model(fields, needed=False)
    if not fields.given("tokens"):
        raise bad("You must give 'tokens': a list of token ids.", "tokens")
    tokens = fields.tokens("tokens", reader.max_prompt_tokens, reader.vocab)
    fields.finish()
    text = reader.decode(list(tokens), special=True)
    return {"prompt": text, "content": text}
