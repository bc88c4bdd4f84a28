"""The HTTP server: the APIs of OpenAI and Anthropic over one engine. Needs the extra `stowage[server]`.

    connections ── middleware ── app ── apis ── bridge ── engine
    bytes, limits  keys, counts  routes fields  threads

Nothing outside this package imports Starlette or uvicorn.
"""
