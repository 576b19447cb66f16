"""First code of a cell, run as a script by a fresh interpreter: finds its package and becomes the
zygote.

Started by `cell.py` with an environment of its own and without site-packages.
"""

import importlib
import os
import sys

if __name__ == "__main__":
    package = os.path.dirname(os.path.abspath(__file__))
    sys.path.append(
        os.path.dirname(package)
    )  # last: what lies beside an installed package may be named like a standard module
    zygote = importlib.import_module(f"{os.path.basename(package)}.zygote")
    del sys.path[-1]
    zygote.main(sys.argv[1:])
