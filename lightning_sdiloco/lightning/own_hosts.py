"""Supports trainers whose hosts are separate sites with their own processes and folders.

By default, Lightning connects the processes of all hosts, and only the first process saves and
logs. In a federation with a self-started hub, each host is a separate world that saves and logs for
itself, although all hosts run the same script with the same folders.
"""

import importlib
from dataclasses import replace

from lightning_sdiloco.federation.config import Federation
from lightning_sdiloco.launch.hosts import launch_of_host, make_world
from lightning_sdiloco.lightning.host import Host, Internal, Trainer, class_names

_KNOWN = {"LightningEnvironment", "SLURMEnvironment", "TorchElasticEnvironment"}
# The attributes in which Lightning's loggers keep their folders.
_FOLDERS_OF_LOGGERS = ("_root_dir", "_save_dir")


def make_site_of_host(host: Host, federation: Federation) -> Federation:
    """Turns this host's processes into a site before any process group exists.

    Returns the federation as seen from the site.
    """
    environment = host.cluster_environment
    if not class_names(type(environment)) & _KNOWN:
        raise ValueError(
            f"{type(environment).__name__} does not work with a federation whose hub starts itself."
            " Launch the hosts with SLURM (srun), with one torchrun per host, or with one script"
            " per host. Alternatively, start a hub (sdiloco hub) and each site as separate jobs."
        )
    launch = launch_of_host()
    if launch.hosts is None and host.num_nodes > 1:
        launch = launch._replace(hosts=host.num_nodes)
    make_world(launch, host.num_processes)
    located = federation.located()
    host.num_nodes = 1
    if launch.launcher == "SLURM":
        host.cluster_environment = _environment_by_variables(environment)
    # Fabric's strategies have the second method.
    set_world_ranks = getattr(host, "set_world_ranks", None) or host._set_world_ranks
    set_world_ranks()
    return located


def _environment_by_variables(environment: Internal) -> Internal:
    """Returns an environment of the same distribution that reads the host's variables."""
    kinds = type(environment).__mro__
    base = next(kind for kind in kinds if kind.__name__ == "ClusterEnvironment")
    environments = importlib.import_module(base.__module__.rpartition(".")[0])
    return environments.LightningEnvironment()


def give_own_folders(trainer: Trainer, federation: Federation) -> Federation:
    """Moves this host's checkpoints and logs into the site's folder.

    The trainer's folders may be shared between hosts. Returns the federation with the hub's folder
    next to the site's folder.
    """
    site = federation.site
    root = str(trainer.default_root_dir)
    beside = root
    for callback in trainer.callbacks:
        if "ModelCheckpoint" not in class_names(type(callback)):
            continue
        dirpath = callback.dirpath
        if dirpath is not None and beside == root:
            beside = str(dirpath)
        callback.dirpath = _below(dirpath or f"{root}/checkpoints", site)
    for logger in trainer.loggers:
        _move_logger(logger, site)
    # Checkpoints saved after SLURM's signal go into this folder.
    trainer._default_root_dir = _below(root, site)
    if federation.folder is not None or "://" in beside:
        return federation
    return replace(federation, folder=f"{beside}/hub-{federation.run}")


def _move_logger(logger: Internal, site: str | None) -> None:
    """Makes a logger write to the site's folder below the logger's folder."""
    for name in _FOLDERS_OF_LOGGERS:
        folder = getattr(logger, name, None)
        if folder is not None:
            setattr(logger, name, _below(folder, site))


def _below(folder: object, site: str | None) -> str:
    """Returns the site's folder below a shared folder, unless the folder is already the site's."""
    text = str(folder).rstrip("/")
    if text.rpartition("/")[2] == site:
        return text
    return f"{text}/{site}"
