"""First code in a jail, run as a script by a fresh interpreter: finds its package, and runs the
`main` of the module that the argument names.

The interpreter has a clean environment and no site-packages.
"""

import importlib
import json
import os
import sys

if __name__ == "__main__":
    package = os.path.dirname(os.path.abspath(__file__))
    # Last: a neighbour of an installed package may have the name of a standard module.
    sys.path.append(os.path.dirname(package))
    # By its folder's name: a cell also runs from a copy of the folder.
    name, *given = json.loads(sys.argv[1])
    module = importlib.import_module(f"{os.path.basename(package)}.{name}")
    del sys.path[-1]
    module.main(*given)
