"""``python -m stowage``: the same as the ``stowage`` command."""

from stowage.cli import run_and_exit

if __name__ == "__main__":
    run_and_exit()
