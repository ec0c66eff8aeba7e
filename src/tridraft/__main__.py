"""`python -m tridraft` is the `tridraft` command."""

from tridraft.speculator.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
