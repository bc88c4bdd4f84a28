"""All benchmarks, one after the other: ``python -m benchmarks [NAME ...]``. Results go to ``benchmarks/results``."""

from __future__ import annotations

import argparse
import subprocess
import sys

NAMES = (
    "control_plane",
    "no_hit_overhead",
    "recorded_prompts",
    "prefix_reuse",
    "integrity",
    "tiers",
    "lossless",
    "load_or_compute",
    "shared_tiers",
    "two_machines",
    "weights",
    "weights_moe",
    "published_moe",
    "formats",
    "placement",
    "capacity",
    "retention",
    "engine",
    "long_context",
    "scale",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(NAMES)} (all)")
    names = parser.parse_args().names or NAMES
    for name in names:
        if name not in NAMES:
            parser.error(f"there is no benchmark {name!r}; choose from: {', '.join(NAMES)}")
    failed = []
    for number, name in enumerate(names, start=1):
        print(f"[{number}/{len(names)}] {name}", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())
