"""`/openapi.json`: every route, with the fields that its body may have. docs/serving.md explains them."""

from __future__ import annotations

from typing import Any, Final

from stowage import __version__

_TEXT, _WHOLE, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_FLAG, _OBJECT, _LIST = {"type": "boolean"}, {"type": "object"}, {"type": "array", "items": {}}
_TEXTS: Final = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}
_ANY: Final[dict[str, Any]] = {}
_KINDS: Final = {
    "text": _TEXT, "whole": _WHOLE, "number": _NUMBER, "flag": _FLAG, "object": _OBJECT, "list": _LIST, "texts": _TEXTS,
    "any": _ANY,
}  # fmt: skip
_SAMPLING: Final = (
    "text:model,cache_salt whole:seed,top_k,min_tokens list:stop_token_ids object:logit_bias "
    "number:temperature,top_p,min_p,presence_penalty,frequency_penalty,repetition_penalty "
    "flag:stream,ignore_eos,skip_special_tokens "
)
_TEMPLATE: Final = (
    "object:chat_template_kwargs text:reasoning_effort flag:continue_final_message,add_generation_prompt "
)
_STRUCTURE: Final = (
    "object:response_format,structured_outputs any:guided_json,guided_choice text:guided_regex,guided_grammar "
)
_TOOLS: Final = "list:tools any:tool_choice flag:parallel_tool_calls "
_CLAUDES: Final = (
    "list:messages,tools any:system object:tool_choice,thinking,output_config,output_format whole:max_tokens "
    "texts:stop_sequences"
)
BODIES: Final[dict[str, tuple[str, str, str]]] = {
    "/v1/completions": (
        "Continue prompts", "model prompt",
        _SAMPLING + _STRUCTURE + "any:prompt whole:n,max_tokens,logprobs flag:echo texts:stop object:stream_options",
    ),
    "/v1/chat/completions": (
        "Answer a conversation", "model messages",
        _SAMPLING + _STRUCTURE + _TEMPLATE + _TOOLS
        + "list:messages whole:n,max_tokens,max_completion_tokens,top_logprobs flag:logprobs texts:stop "
        "object:stream_options",
    ),
    "/v1/responses": (
        "Answer input items (OpenAI's Responses API)", "model input",
        _SAMPLING + _TEMPLATE + _TOOLS
        + "any:input text:instructions whole:max_output_tokens object:text,reasoning,stream_options texts:stop",
    ),
    "/v1/messages": (
        "Answer a conversation (Anthropic's API)", "model messages max_tokens",
        _SAMPLING + _CLAUDES,
    ),
    "/v1/messages/count_tokens": (
        "How many tokens a conversation has", "model messages",
        _SAMPLING + _CLAUDES,
    ),
    "/v1/embeddings": (
        "Vectors of texts", "model input", "text:model,encoding_format,user any:input whole:dimensions"
    ),
    "/tokenize": (
        "Tokens of a text or a conversation", "",
        _TEMPLATE + _TOOLS
        + "text:model,prompt,content list:messages flag:add_special_tokens,return_token_strs,with_pieces",
    ),
    "/detokenize": ("The text of tokens", "tokens", "text:model list:tokens"),
}  # fmt: skip
"""The routes that take a body: what each does, its required fields, and all its fields by type."""
_READ: Final = {
    "/": "The dashboard", "/health": "200 while requests are taken in", "/version": "The version of Stowage",
    "/metrics": "Statistics for Prometheus", "/v1/models": "The models", "/v1/models/{model}": "One model",
    "/v1/stowage/state": "What the dashboard shows", "/openapi.json": "This",
}  # fmt: skip


def described(name: str) -> dict[str, Any]:
    """The document, for a server of the model `name`."""
    paths: dict[str, Any] = {path: {"get": _operation(path, about)} for path, about in _READ.items()}
    for path, (about, needed, fields) in BODIES.items():
        schema = {"type": "object", "properties": _properties(fields), "additionalProperties": False}
        schema |= {"required": needed.split()} if needed else {}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": _operation(path, about) | {"requestBody": body}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Stowage", "version": __version__, "description": f"Serves {name}."},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _operation(path: str, about: str) -> dict[str, Any]:
    asked = [{"name": "model", "in": "path", "required": True, "schema": _TEXT}] if "{model}" in path else []
    return {"summary": about, "responses": {"200": {"description": "The answer"}}} | (
        {"parameters": asked} if asked else {}
    )


def _properties(fields: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for group in fields.split():
        kind, _, names = group.partition(":")
        found |= dict.fromkeys(names.split(","), _KINDS[kind])
    return found
