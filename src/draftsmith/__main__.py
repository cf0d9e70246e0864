"""Runs the command: `draftsmith`, or `python -m draftsmith`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is imported ends it quietly, too."""
    try:
        from draftsmith.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
