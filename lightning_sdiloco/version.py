"""The version of the package, its distribution, its checkpoints and its run configs."""

from pathlib import Path

VERSION = "0.1.0"


def require_one_distribution(folder: Path) -> None:
    """Refuses a folder of packages into which both distributions were installed.

    Raises:
        ImportError: If both are installed: they share files and may have different versions.
    """
    distributions = {
        path.name.split("-")[0] for path in folder.glob("lightning_sdiloco*.dist-info")
    }
    if len(distributions) > 1:
        raise ImportError(
            f"lightning-sdiloco and lightning-sdiloco-hub are both installed in {folder}. They"
            " share files, so one may run with parts of the other. Remove both (pip uninstall"
            " lightning-sdiloco lightning-sdiloco-hub), and install one: the first has all of the"
            " second."
        )
