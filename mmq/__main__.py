"""`python -m mmq`."""

from mmq.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
