"""`python -m kestrel` is `kestrel`."""

import sys

from kestrel.cli import main

if __name__ == "__main__":
    sys.exit(main())
