"""Runs ``sdiloco keys``, which creates and revokes a federation's keys."""

from lightning_sdiloco.federation.keys import Role, add_keys, init_keys, revoke_keys
from lightning_sdiloco.planning.link import require


def init(folder: str, run: str | None = None, days: int = 3650) -> str:
    """Create a folder with a federation's authority and a bundle for its hub.

    Args:
        folder: Folder to create. Anyone who can read this folder can act as any site.
        run: Run for which the keys are valid. By default, this is the first run whose hub is
            started with this folder.
        days: Maximum number of days for which added keys can be valid.

    Examples:
        $ sdiloco keys init keys --run pretrain
    """
    require(days >= 1, "days", days, "at least 1, because certificates expire after that many days")
    bundle = init_keys(folder, run, days)
    return (
        f"{bundle} is for the hub, which also accepts the folder {folder}. Keep this folder"
        " private, and add sites to it."
    )


def add(folder: str, names: list[str], role: Role = "site", days: int = 365) -> str:
    """Create a bundle for each name. A bundle is the only file that its holder needs.

    Args:
        folder: Folder that `sdiloco keys init` created.
        names: Names of sites, operators or readers.
        role: Role of the holders. A site trains, an operator evicts sites and ends runs, and a
            reader views the status.
        days: Number of days for which the keys are valid.

    Examples:
        $ sdiloco keys add keys site-a site-b
    """
    require(days >= 1, "days", days, "at least 1, because certificates expire after that many days")
    bundles = [add_keys(folder, name, role, days) for name in names]
    return "\n".join(
        f"{bundle}: for {role} {name}" for bundle, name in zip(bundles, names, strict=True)
    )


def revoke(folder: str, names: list[str]) -> str:
    """Revoke all keys of the holders. A hub that uses the folder then refuses these keys.

    Args:
        folder: Folder that `sdiloco keys init` created.
        names: Names of holders.
    """
    lines = []
    for name in names:
        lines += [f"{name}: revoked {key}" for key in revoke_keys(folder, name)]
    return "\n".join(lines)
