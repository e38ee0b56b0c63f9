"""`python -m moeclipse` is `moeclipse`."""

import sys

from moeclipse.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
