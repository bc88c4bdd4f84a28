"""Random cache groups, and the definition of attention that the strategies are held against.

`reads` is the attention mask of each kind, token by token. The models below are slow and follow from it alone.
"""

from __future__ import annotations

from hypothesis import strategies as st

from stowage.core.geometry import Group, Kind


@st.composite
def groups(draw: st.DrawFn, index: int = 0, block_tokens: st.SearchStrategy[int] | None = None) -> Group:
    """A small group of any kind; windows smaller, equal to, between and larger than blocks, chunks and prompts."""
    kind = draw(st.sampled_from(Kind))
    return Group(
        index=index,
        kind=kind,
        block_tokens=draw(st.integers(1, 6) if block_tokens is None else block_tokens),
        blocks_per_chunk=1 if kind is Kind.RECURRENT else draw(st.integers(1, 5) | st.just(64)),
        bytes_per_block=draw(st.integers(1, 100)),
        window=draw(st.integers(1, 40) | st.just(10_000)) if kind in (Kind.SLIDING, Kind.CHUNKED) else 0,
    )


def reads(group: Group, query: int, token: int) -> bool:
    """The attention mask: does a query at one position read the keys and values of a token?"""
    match group.kind:
        case Kind.FULL:
            return token <= query
        case Kind.SLIDING:
            return token <= query and query - token < group.window
        case Kind.CHUNKED:
            return token <= query and query // group.window == token // group.window
        case Kind.RECURRENT:
            raise AssertionError("a recurrent query reads the state, not tokens")


def read_later(group: Group, position: int, token: int) -> bool:
    """Does any query at `position` or after it read the token?

    No kind's queries read farther back than the queries before them, so the first that could reach the token decide.
    """
    return any(reads(group, query, token) for query in range(position, max(position, token) + 2))


def blocks_to_resume(group: Group, boundary: int) -> set[int]:
    """The blocks that must be valid for all queries from `boundary` on, when everything from there on is computed."""
    if group.kind is Kind.RECURRENT:
        return {boundary // group.block_tokens - 1} if boundary else set()
    return {token // group.block_tokens for token in range(boundary) if read_later(group, boundary, token)}
