"""The version of the package, which is also stored in checkpoints and run configs."""

from pathlib import Path

VERSION = "0.1.0"


def require_one_distribution(folder: Path) -> None:
    """Raises an error if both distributions are installed in the same folder of packages.

    Raises:
        ImportError: If both distributions are installed, because they share files and may differ in
            version.
    """
    distributions = {
        path.name.split("-")[0] for path in folder.glob("lightning_sdiloco*.dist-info")
    }
    if len(distributions) > 1:
        raise ImportError(
            f"lightning-sdiloco and lightning-sdiloco-hub are both installed in {folder}. They"
            " share files, so one package may run with parts of the other. Remove both packages"
            " (pip uninstall lightning-sdiloco lightning-sdiloco-hub), and then install only one"
            " of them. lightning-sdiloco includes the hub."
        )
