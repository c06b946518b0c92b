"""The entry point of `ckptconv` and `python -m ckptconv`. It handles signals before it imports anything large."""

from __future__ import annotations

from ckptconv.cli import signals


def main() -> None:
    """Run the command line and exit."""
    signals.leave_at_once()
    import gc

    from ckptconv.cli.main import main as run
    from ckptconv.process import make_ours

    make_ours()
    try:
        run()
    finally:
        gc.freeze()  # it all goes with the process: the interpreter need not look through it once more


if __name__ == "__main__":
    main()
