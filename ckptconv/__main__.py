"""The entry point of `ckptconv` and `python -m ckptconv`. It handles signals before it imports anything large."""

from __future__ import annotations

from ckptconv.cli import signals


def main() -> None:
    """Run the command line and exit."""
    signals.leave_at_once()
    from ckptconv.process import leave_garbage, make_ours

    make_ours()
    from ckptconv.cli.main import main as run

    try:
        run()
    finally:
        leave_garbage()


if __name__ == "__main__":
    main()
