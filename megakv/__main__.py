"""``python -m megakv``: the ``megakv`` command."""

import sys

from megakv.launcher.command import main

if __name__ == "__main__":
    sys.exit(main())
