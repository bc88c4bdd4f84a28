"""A hundred keys of every sort, made only of arithmetic: what they are is written down in unit/golden_keys.json.

Run as a program it prints them, one per line, for tests that ask other processes and other versions of Python.
"""

from __future__ import annotations

from collections.abc import Iterator

from stowage.core.key import Chain, Field, group_keys, namespace, private_key, tenant_namespace


def some_tokens(count: int, seed: int) -> list[int]:
    """Token ids over all of 32 bits."""
    return [(seed * 2654435761 + n * 40503 + n**3) % (1 << 32) for n in range(count)]


def _fields(number: int) -> dict[str, Field]:
    """Fields of every type, in an order that depends on the number."""
    fields: dict[str, Field] = {
        "weights": bytes(range(number, number + 32)),
        "family": ["llama", "gemma3_text", "naïve 名"][number % 3],
        "rope": {"theta": 10000.0 * (number + 1), "scaling": None, "nested": {"factor": 1 / (number + 3)}},
        "groups": [{"kind": "full", "window": 0}, {"kind": "sliding", "window": 72 + number}],
        "exact": number % 2 == 0,
        "large": -(1 << (60 + number)),
    }
    names = list(fields)
    return {name: fields[name] for name in names[number % len(names) :] + names[: number % len(names)]}


def hundred() -> Iterator[str]:
    """The keys in hexadecimal: 10 namespaces, each with a tenant's, 7 chunks of two groups, and a private one."""
    for number in range(10):
        space = namespace(_fields(number))
        tenant = tenant_namespace(space, ["", "acme", b"\x00\xff", "größe"][number % 4])
        chain = Chain(tenant, number + 1)
        media = [(number, bytes([number] * 5)), (3 * number + 1, b"picture")] if number % 2 else []
        digests = chain.extend(some_tokens(5 * (number + 1), number), media)
        digests += chain.extend(some_tokens(2 * (number + 1), number + 100))
        keys = group_keys(digests[:4], number) + group_keys(digests[4:], 65535 - number)
        yield from (key.hex() for key in keys)
        yield private_key(tenant, number, number * 257, 1 << (4 * number), bytes(number)).hex()
        yield space.hex()
        yield tenant.hex()


if __name__ == "__main__":
    print("\n".join(hundred()))
