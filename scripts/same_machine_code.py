"""Holds the machine code of two builds' GPU kernels against each other, function by function.

usage: same_machine_code.py BEFORE AFTER      (each an object file, a cubin, or a folder of them; of a build folder those
                                              that the library has)

A function whose name changed (it stands in its namespace, and names its parameters' types) is found by its code. "Moved":
the same instructions in another order, registers aside; whether that is the same kernel is for a reader to say. Fails
where a function differs.
"""

import collections
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def functions(path: Path, cuobjdump: str) -> dict[str, str]:
    """name and architecture -> what it is assembled to."""
    library = path / "src/CMakeFiles/heddle.dir/cuda"
    folder = library if library.is_dir() else path
    files = [path] if path.is_file() else sorted(f for ending in ("cu.o", "cubin") for f in folder.rglob(f"*.{ending}"))
    found = {}
    for file in files:
        dump = subprocess.run([cuobjdump, "-sass", file], check=True, capture_output=True, text=True).stdout
        for code in re.split(r"(?m)^\s*code for ", dump)[1:]:
            architecture = code.split("\n", 1)[0].strip()
            for function in code.split("Function : ")[1:]:
                name, body = function.split("\n", 1)
                lines = re.findall(r"^\s*/\*[^\n]*", body, re.MULTILINE)
                # Columns are as wide as the file's longest line takes.
                found[f"{name.strip()} {architecture}"] = "\n".join(" ".join(line.split()) for line in lines)
    if not found:
        sys.exit(f"same_machine_code.py: {path} has no machine code of a GPU")
    return found


def instructions(body: str) -> list[str]:
    """A function's, sorted, without addresses and numbers of registers."""
    return sorted(re.sub(r"\bU?[RP]\d+\b", "R", re.sub(r"/\*.*?\*/", "", line)).strip() for line in body.split("\n"))


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    cuobjdump = subprocess.run(
        [ROOT / "scripts/cuobjdump.sh"], check=True, capture_output=True, text=True
    ).stdout.strip()
    before, after = (functions(Path(path), cuobjdump) for path in sys.argv[1:])
    left = collections.Counter(before.values())
    left.subtract(after.values())
    gone = [name for name, body in before.items() if left[body] > 0]
    new = [name for name, body in after.items() if left[body] < 0]
    for name in new:
        was = before.get(name)
        moved = was is not None and instructions(was) == instructions(after[name])
        print("moved" if moved else "differs" if was is not None else "new", name)
    for name in gone:
        if name not in after:
            print("gone", name)
    print(f"{len(after) - len(new)} of {len(after)} functions are the same as before")
    sys.exit(bool(new or gone))


if __name__ == "__main__":
    main()
