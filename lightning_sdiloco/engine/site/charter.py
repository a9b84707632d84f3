"""The charter that a site brings: what must be the same at all sites, told by the engine that it starts."""

import hashlib
from importlib.metadata import version

import torch
from torch import Tensor, nn

from lightning_sdiloco.algorithm import Aggregation, Control, Settings, all_reduce_for
from lightning_sdiloco.compression import Kernels
from lightning_sdiloco.engine.arithmetic import norm_squared
from lightning_sdiloco.engine.outer.optimizer import outer_optimizer_for
from lightning_sdiloco.engine.parameters.layouts import ShardedLayout
from lightning_sdiloco.engine.parameters.naming import trainable
from lightning_sdiloco.engine.rounds import Rounds
from lightning_sdiloco.engine.site.arithmetic import to_bytes
from lightning_sdiloco.engine.site.federation import Federation
from lightning_sdiloco.federation import Charter, Terms

# Values of the self-test: no multiple of a block, so that padding is tested too.
_TESTED = 4099


def charter_of(
    federation: Federation, model: nn.Module, rounds: Rounds, settings: Settings, kernels: Kernels
) -> Charter:
    """Returns what this site would found the run on."""
    terms = Terms(
        fragments=len(rounds.fragments),
        sync_every=settings.sync_every,
        overlap_steps=settings.overlap_steps,
        grace=float(federation.seconds_of_grace),
        lease=float(federation.lease),
        quorum=federation.quorum_of_terms,
        rounds=federation.rounds,
    )
    parameters = trainable(model)
    fragments = tuple(
        (
            *((name, f"{tuple(parameters[name].shape)} {parameters[name].dtype}") for name in own.layout.names),
            *((name, f"{tuple(buffer.shape)} buffer") for name, buffer in own.buffers.named().items()),
        )
        for own in rounds.fragments
    )
    return Charter(
        run=federation.run,
        terms=terms,
        settings={**settings.fixed_by_a_checkpoint(), **rounds.described()},
        fragments=fragments,
        shards=tuple(_shards(own.layout) for own in rounds.fragments),
        versions={"torch": str(torch.__version__).split("+")[0], "lightning-sdiloco": version("lightning-sdiloco")},
        self_test=self_test(settings, kernels, rounds.fragments[0].storage.device),
    )


def _shards(layout: object) -> tuple[int, ...]:
    """Returns the sizes of the shards of a fragment, where ranks must be the same everywhere."""
    if not isinstance(layout, ShardedLayout):
        return ()
    return tuple(layout.lengths)


def self_test(settings: Settings, kernels: Kernels, device: torch.device) -> str:
    """Returns what the arithmetic of this site makes of known values: compression, weights, mean and outer step."""
    outer, *gradients = (_known(seed, device) for seed in range(4))
    all_reduce = all_reduce_for(settings.exchange, 1, settings.codec, settings.landing.kept, kernels).at(1)
    payloads = [all_reduce.encode(gradient, None).payloads[0] for gradient in gradients]
    controls = [
        Control(0, 1, 0, weight=3 + group, digest=0, norm_squared=norm_squared(own), changed=0, finite=True)
        for group, own in enumerate(gradients)
    ]
    optimizer = outer_optimizer_for(settings, [outer])
    state = optimizer.take_initial()[0]
    seal = hashlib.sha256()
    for _ in range(2):
        mean = all_reduce.mean(payloads, Aggregation(settings.outer_clip_norm).count(controls), like=outer)
        state = optimizer.step(0, state, state.values, mean)
        seal.update(to_bytes(state.values.view(torch.uint8)))
    return seal.hexdigest()


def _known(seed: int, device: torch.device) -> Tensor:
    # No random numbers: those of torch differ between processors.
    numbers = torch.arange(_TESTED, dtype=torch.int64) * 7919 * (2 * seed + 1) % 2003
    return ((numbers - 1001).to(torch.float32) / 997).to(device)
