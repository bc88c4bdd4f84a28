"""``python -m stowage``: the same as the ``stowage`` command."""

from stowage.cli import main

if __name__ == "__main__":
    main()
