"""The pages of the reference, in build/reference. Called by scripts/docs.sh with the command `heddle`."""

import shutil
import sys

import command_reference
import cpp_reference
import python_reference
from text import ROOT


def main() -> None:
    folder = ROOT / "build/reference"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    python_reference.write(folder / "python")
    cpp_reference.write(ROOT / "include/heddle", folder / "cpp")
    command_reference.write(sys.argv[1], folder / "command.md")


if __name__ == "__main__":
    main()
