"""Runs ``sdiloco keys``: makes the authority of a federation, bundles for its holders, and takes them back."""

from lightning_sdiloco.comm import Role, add_keys, init_keys, revoke_keys


def init(folder: str, run: str | None = None, days: int = 3650) -> str:
    """Make the authority of a federation in a folder, with a bundle for its hub."""
    _require_days(days)
    bundle = init_keys(folder, run, days)
    return f"{bundle}: for the hub, which also takes {folder} itself. Keep the folder to yourself, and add sites to it."


def add(folder: str, names: list[str], role: Role = "site", days: int = 365) -> str:
    """Make a bundle for each name: the one file that its holder needs."""
    _require_days(days)
    bundles = [add_keys(folder, name, role, days) for name in names]
    return "\n".join(f"{bundle}: for {role} {name}" for bundle, name in zip(bundles, names, strict=True))


def revoke(folder: str, names: list[str]) -> str:
    """Take back all keys of holders: a hub that runs with the folder refuses them from then on."""
    return "\n".join(f"{name}: revoked {one}" for name in names for one in revoke_keys(folder, name))


def _require_days(days: int) -> None:
    if days < 1:
        raise ValueError(f"days={days} is out of range: it must be at least 1. It says when certificates expire.")
