"""`python -m ckptconv` is `ckptconv`."""

from __future__ import annotations

from ckptconv.cli import main

if __name__ == "__main__":
    main()
