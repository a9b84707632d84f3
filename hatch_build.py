"""Compiles the files of C of the package when it is built; ``python hatch_build.py`` does that in a
checkout.

What they do torch's operations do too, so a machine without a C compiler builds the package without
them.
"""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand
    BuildHookInterface = object

ROOT = Path(__file__).parent
SOURCE = ROOT / "lightning_sdiloco" / "compression" / "fp4.c"

# Products and sums round one after the other, as operations of torch do.
FLAGS = ("-O3", "-std=c99", "-ffp-contract=off", "-fPIC", "-shared")


class CompileHook(BuildHookInterface):  # type: ignore[misc]
    """Has the library in the wheel, which is for machines of this kind then, or beside its
    source.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Is called before the wheel is written."""
        library = compiled(SOURCE)
        if library is not None:
            build_data["artifacts"].append(f"/{library.relative_to(ROOT).as_posix()}")
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"


def compiled(source: Path) -> Path | None:
    """Compiles a file of C into a library beside it; None, and no library, if that cannot be done
    here.
    """
    library = source.with_name(f"lib{source.stem}.so")
    library.unlink(missing_ok=True)
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        print(
            "There is no C compiler (cc, gcc, clang): operations of torch take the place of fp4.c,"
            " and longer."
        )
        return None
    # Under another name until it is whole: a process may be loading the one before.
    part = library.with_suffix(".part")
    try:
        subprocess.run([compiler, *FLAGS, "-o", str(part), str(source)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(
            f"fp4.c was not compiled ({error}): operations of torch take its place, and take"
            " longer."
        )
        part.unlink(missing_ok=True)
        return None
    return part.rename(library)


if __name__ == "__main__":
    sys.exit(compiled(SOURCE) is None)
