"""The HTTP server: an API that OpenAI clients speak, over one engine. Needs the extra `stowage[server]`.

    connections ── front ── app ── openai ── bridge ── engine
    bytes, limits  keys,    routes fields    threads
                   counts

Nothing outside this package imports Starlette or uvicorn.
"""
