"""Runs ``sdiloco keys``, which makes a federation's authority and bundles, and revokes keys."""

from lightning_sdiloco.federation.keys import Role, add_keys, init_keys, revoke_keys
from lightning_sdiloco.planning.link import require


def init(folder: str, run: str | None = None, days: int = 3650) -> str:
    """Make a federation's authority in a folder, with a bundle for its hub.

    Args:
        folder: The folder. Anyone who can read it can act as any site.
        run: The run that the keys are for. By default, the first run whose hub is started with the
            folder.
        days: The longest time, in days, for which added keys can be valid.

    Examples:
        $ sdiloco keys init keys --run pretrain
    """
    require(days >= 1, "days", days, "at least 1: it says when certificates expire")
    bundle = init_keys(folder, run, days)
    return f"{bundle}: for the hub, which also accepts {folder} itself. Keep the folder private, and add sites to it."


def add(folder: str, names: list[str], role: Role = "site", days: int = 365) -> str:
    """Make a bundle for each name: the one file that its holder needs.

    Args:
        folder: The folder of `sdiloco keys init`.
        names: Names of sites, operators or readers.
        role: What the holders may do: a site trains, an operator evicts sites and ends runs, a
            reader sees the status.
        days: Number of days for which the keys are valid.

    Examples:
        $ sdiloco keys add keys site-a site-b
    """
    require(days >= 1, "days", days, "at least 1: it says when certificates expire")
    bundles = [add_keys(folder, name, role, days) for name in names]
    return "\n".join(
        f"{bundle}: for {role} {name}" for bundle, name in zip(bundles, names, strict=True)
    )


def revoke(folder: str, names: list[str]) -> str:
    """Revoke all keys of the holders: a hub that runs with the folder then refuses them.

    Args:
        folder: The folder of `sdiloco keys init`.
        names: Names of holders.
    """
    lines = []
    for name in names:
        lines += [f"{name}: revoked {key}" for key in revoke_keys(folder, name)]
    return "\n".join(lines)
