"""Install packages into an environment of this checkout, for the Makefile.

Needs nothing but Python, and says in a line what is missing, also to a Python that is too old. What an interrupted
installation left is removed by the next one: an environment is whole if, and only if, it holds the file `.installed`.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

OLDEST = (3, 11)
BEGUN, WHOLE = ".installing", ".installed"
REASONS = {
    "No space left on device": "the disk is full; `df -h . {tmp}` shows which one. TMPDIR=DIR moves what is downloaded",
    "Disk quota exceeded": "your quota is used up. TMPDIR=DIR and PIP_CACHE_DIR=DIR move what is downloaded",
    "Permission denied": "a file could not be written, which pip names above",
    "connection broken": "no package index answers. Check the network, or the proxy in https_proxy",
    "from versions: none": "no package index answers, or none has the package that pip names above",
}
"""What pip prints → what that means."""


def main(arguments: "list[str]") -> int:  # in quotes, since an older Python would end at them instead of with a line
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description="Install into an environment of this checkout.")
    parser.add_argument("folder", type=Path, help="the environment")
    parser.add_argument("--takes-gb", type=float, required=True, help="its size; downloads take half of it more")
    parser.add_argument("--cuda", type=int, help="whose major version the index's own torch is built for")
    parser.add_argument("--sees", type=Path, help="a folder whose modules it can import")
    asked, pip = parser.parse_known_args(arguments)
    try:
        refusal = _refusal(asked.folder, takes_gb=asked.takes_gb)
        if not refusal and asked.cuda and "--extra-index-url" not in pip:
            refusal = _too_old_a_driver(asked.cuda)
        if not refusal:
            refusal = _install(asked.folder, pip, sees=asked.sees)
    except KeyboardInterrupt:
        refusal = "interrupted. The same command begins again, and removes what is half installed"
    except (OSError, subprocess.CalledProcessError) as error:
        refusal = str(error)
    if refusal:
        print(f"Not installed: {refusal}.", file=sys.stderr)
    return 1 if refusal else 0


def _refusal(folder: Path, *, takes_gb: float) -> str:
    """Why nothing can be installed; empty where it can."""
    if sys.version_info < OLDEST:
        found = f"{sys.executable} is Python {sys.version_info[0]}.{sys.version_info[1]}"
        return f"Python 3.11 or newer is needed, and {found}. Try: make PYTHON=python3.12"
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        return "this Python can make no environments. On Debian and Ubuntu: apt install python3-venv"
    place = folder.absolute().parent
    if not os.access(place, os.W_OK, effective_ids=True):
        return f"you may not write to {place}. Clone the project into a folder of your own"
    if (folder / BEGUN).exists():
        print(f"An installation into {folder} was interrupted: it begins again.", flush=True)
        shutil.rmtree(str(folder))
    return "" if (folder / WHOLE).exists() else _no_room(place, takes_gb)


def _too_old_a_driver(cuda: int) -> str:
    """Why this machine's driver can't run a torch that is built for this CUDA; empty: it can, or there is none."""
    try:
        nvml, found = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_int()
        failed = nvml.nvmlInitWithFlags(0) or nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(found))
    except (OSError, AttributeError):
        return ""
    if failed or found.value >= 1000 * cuda:
        return ""
    newest = f"{found.value // 1000}.{found.value % 1000 // 10}"
    return (
        f"the driver here supports CUDA {newest}, and torch's wheel is built for CUDA {cuda}, so it could use no GPU. "
        f"Give the index of torch's wheels for CUDA {found.value // 1000} (or for CPUs, which are small): "
        "make install TORCH_INDEX=URL"
    )


def _no_room(place: Path, takes_gb: float) -> str:
    temporary = Path(tempfile.gettempdir())
    needed = {place: takes_gb, temporary: takes_gb / 2}
    if place.stat().st_dev == temporary.stat().st_dev:
        needed = {place: takes_gb * 1.5}
    for where, needed_gb in needed.items():
        free_gb = shutil.disk_usage(where).free / 1e9
        if free_gb < needed_gb:
            way = "TMPDIR=DIR moves what is downloaded" if where == temporary else "Make room there"
            return f"{needed_gb:.0f} GB are needed in {where}, and {free_gb:.1f} GB are free. {way}"
    return ""


def _install(folder: Path, pip: "list[str]", *, sees: "Path | None") -> str:
    """Why it failed; empty where it did not."""
    folder.mkdir(exist_ok=True)
    (folder / BEGUN).touch()
    (folder / WHOLE).unlink(missing_ok=True)
    program = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    command = [program, "-m", "pip", "install", "--disable-pip-version-check", *pip]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        reasons: list[str] = []
        for line in process.stderr or ():
            sys.stderr.write(line)
            reasons += [reason for printed, reason in REASONS.items() if printed in line]
    if process.returncode:
        return (reasons or ["pip says above why"])[-1].format(tmp=tempfile.gettempdir())
    if sees is not None:
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        library = subprocess.run([program, "-c", code], check=True, capture_output=True).stdout.strip()
        (Path(os.fsdecode(library)) / "seen.pth").write_text(f"{sees.absolute()}\n")
    (folder / WHOLE).touch()
    (folder / BEGUN).unlink()
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
