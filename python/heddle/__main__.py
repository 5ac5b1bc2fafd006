"""The command ``heddle``: ``python -m heddle info``. Wheels bring it; a package built without it says so."""

import os
import sys


def main() -> None:
    command = os.path.join(os.path.dirname(__file__), "bin", "heddle")
    if not os.path.exists(command):
        print(
            "heddle: this package was built without the command; wheels have it, and so has what "
            "`pip install . --config-settings=cmake.define.HEDDLE_BUILD_CLI=ON` builds",
            file=sys.stderr,
        )
        sys.exit(3)
    os.execv(command, ["heddle", *sys.argv[1:]])


if __name__ == "__main__":
    main()
