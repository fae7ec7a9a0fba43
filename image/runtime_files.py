"""``python runtime_files.py VENV TARGET``: the files that a virtual environment needs to run, and no others.

Run while the image is built, by the base interpreter of ``VENV``, where that image's own package tools are. ``TARGET``
becomes the root of an image from ``scratch``: the interpreter with the modules of its standard library that a server
can use, compiled; the shared libraries that these and the environment are linked to; trusted certificates, and a user.
There is no shell, no package tool, and no program but Python.
"""

import compileall
import os
import py_compile
import shutil
import ssl
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

LEFT_OUT: Final = frozenset(
    {
        "__pycache__",
        "curses",
        "dbm",
        "dist-packages",
        "distutils",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "sqlite3",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
        "unittest",
        "venv",
    }
)
"""Packages of the standard library that serve people, other programs, or tests."""

LEFT_OUT_EXTENSIONS: Final = ("_curses", "_dbm", "_gdbm", "_sqlite3", "_test", "_tkinter", "_xx", "readline", "xx")
"""What the names of extension modules begin with that these would need."""

OPENED_BY_NAME: Final = ("libgcc_s.so.1",)
"""Libraries that libc opens by itself (to cancel a thread), so no file is linked to them."""

COMMANDS: Final = ("operator-app", "python")
"""What the names of the environment's programs begin with that are kept."""

SYSTEM_CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
USER: Final = "operator:x:65532:65532::/:\n"
GROUP: Final = "operator:x:65532:\n"


def main() -> None:
    """Copy everything; a library that is not found ends it with an error."""
    venv, target = (Path(each) for each in sys.argv[1:3])
    interpreter = Path(sys.executable)
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in (interpreter, venv / "bin" / "python"):
        for link in _links(path):
            if not link.is_relative_to(venv):
                _copy(link, target)
    kept = list(_modules(stdlib))
    for file in kept:
        _copy(file, target)
    compiled = compileall.compile_dir(
        str(target) + str(stdlib),
        stripdir=str(target),
        quiet=1,
        workers=0,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    if not compiled:
        sys.exit("the standard library can't be compiled")
    shutil.copytree(venv, str(target) + str(venv), symlinks=True, ignore=_for_people)
    linked = [interpreter, *(file for file in kept if file.suffix == ".so"), *venv.rglob("*.so")]
    for library in sorted(_libraries(linked)):
        _copy(library, target)
    _copy_settings(target)


def _links(path: Path) -> Iterator[Path]:
    """A path, and each that it leads to through symbolic links; the last one is a file."""
    yield path
    while path.is_symlink():
        path = path.parent / path.readlink()
        yield path


def _for_people(directory: str, names: list[str]) -> list[str]:
    """What an environment has for shells and compilers, and the commands of its packages but for the operator's."""
    if Path(directory).name == "bin":
        return [name for name in names if not name.startswith(COMMANDS)]
    return [name for name in names if name in {".gitignore", "include"}]


def _modules(stdlib: Path) -> Iterator[Path]:
    """The files of the standard library, but for what a server never imports."""
    for directory, names, files in os.walk(stdlib):
        names[:] = [name for name in names if name not in LEFT_OUT and not name.startswith("config-")]
        for name in files:
            if name.endswith(".py") or (name.endswith(".so") and not name.startswith(LEFT_OUT_EXTENSIONS)):
                yield Path(directory) / name


def _libraries(linked: list[Path]) -> set[Path]:
    """What the dynamic loader opens for these files, and the loader itself, by the paths at which it looks."""
    found: set[Path] = set()
    for file in linked:
        done = subprocess.run(("ldd", file), capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            if "not found" in line:
                sys.exit(f"{file}: {line.strip()}")
            # "libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x…)", or only a path, for the loader.
            found.update(Path(word) for word in line.split() if word.startswith("/"))
    beside_libc = next(path.parent for path in found if path.name.startswith("libc.so"))
    return found | {file for name in OPENED_BY_NAME if (file := beside_libc / name).exists()}


def _copy(file: Path, target: Path) -> None:
    """One file or link to its own path below ``target``; a library's link becomes the library."""
    copy = Path(f"{target}{file}")
    if copy.exists() or copy.is_symlink():
        return
    copy.parent.mkdir(parents=True, exist_ok=True)
    if file.is_symlink() and ".so" not in file.name:
        copy.symlink_to(file.readlink())
    else:
        shutil.copy2(file, copy)


def _copy_settings(target: Path) -> None:
    """What libraries read below ``/etc``, and where OpenSSL looks for certificates."""
    for name, text in {"passwd": USER, "group": GROUP, "nsswitch.conf": "hosts: files dns\n"}.items():
        (target / "etc").mkdir(exist_ok=True)
        (target / "etc" / name).write_text(text, encoding="ascii")
    if SYSTEM_CERTIFICATES.exists():
        bundle = Path(f"{target}{ssl.get_default_verify_paths().openssl_cafile}")
        bundle.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(SYSTEM_CERTIFICATES, bundle)
    for file in (Path("/etc/ld.so.conf"), *Path("/etc/ld.so.conf.d").glob("*.conf")):
        if file.exists():
            _copy(file, target)
    subprocess.run(("/sbin/ldconfig", "-r", target), check=True)


if __name__ == "__main__":
    main()
