"""The HTTP server: the APIs of OpenAI and Anthropic over one engine. Needs the extra `stowage[server]`.

    connections ── middleware ── app ── apis ── async_engine ── engine
    bytes, limits  keys, metrics routes fields  threads

Nothing outside this package imports Starlette or uvicorn.
"""
