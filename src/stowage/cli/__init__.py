"""The ``stowage`` command. Thin: each file turns flags into one call below, and its result into text or JSON.

Machine output (``--json``) and generated text go to stdout; progress, summaries and errors go to stderr. Exit status:
0 done, 1 the check that was asked for failed (``verify``, ``doctor``, ``scrub``), 2 wrong use or a ``StowageError``,
130 interrupted.
No file here imports torch, transformers or numpy at its top, so ``--help`` answers at once.
"""


def main() -> None:
    """Entry point of the ``stowage`` command."""
    from stowage import openmp
    from stowage.cli.app import app

    openmp.wait_briefly()
    app()
