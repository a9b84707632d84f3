"""Measures the cost of LoRA in two worker groups compared with DDP, for a pretrained model that a
package ships.

    python -m benchmarks.shipped [--stage STAGE] [--workers N] [--minutes M] [--quick] [--json FILE]
                                 [--picture FILE]

The package rxnmapper contains an ALBERT that is pretrained on chemical reactions, as a masked
language model of SMILES strings. Adapters of peft are fine-tuned for 200 steps on single molecules,
whose strings are in the package chemicals. Nothing is downloaded when it runs. It needs both
packages (``pip install --no-deps rxnmapper==0.4.3 chemicals==1.5.2``), and peft and transformers in
the versions of constraints.txt. There are two stages:

- ``rates``: the inner learning rate, separately for DDP and for worker groups, with one seed.
- ``verdict``: three other seeds, with the rates of the previous stage, each paired with a DDP run
  with the same molecules, masks and adapters, and the model before any training.

With --json, every run is saved as soon as it ends, and runs that are already in the file are
skipped.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks import comparison
from benchmarks.models import Size, next_byte_loss
from benchmarks.quality import Pair, chosen
from benchmarks.training import Text, Training
from lightning_sdiloco.algorithm.config import overlap_in_round, round_lengths

# The folder of text_data is on the path since the import of benchmarks.models.
from text_data import Windows  # isort: skip

VERSIONS = {"rxnmapper": "0.4.3", "chemicals": "1.5.2"}
SHIPPED = "models/transformers/albert_heads_8_uspto_all_1310k"
STRINGS = "Identifiers/chemical identifiers pubchem large.tsv"
"""The packages, the folder of the model in rxnmapper, and the file of molecules in chemicals."""

SHORTEST, LONGEST = 24, 40
"""The tokens of a molecule."""

SIZE = Size(layers=12, width=256, heads=8, context=LONGEST + 2)
"""The shape of the model; its layers share their weights."""

PARAMETERS = 735_567
ADAPTERS = 31_744
"""The values of the pretrained model, and those that are trained."""

RANK = 8
ADAPTED = ["query", "key", "value", "dense", "ffn", "ffn_output"]
GROUPS = 2
BATCH = 4
STEPS = 200
VALIDATION_MOLECULES = 512
MASKED = 5
"""The masked tokens of a molecule."""

PAD, BEGIN, END, MASK = 0, 12, 13, 14
IGNORED = -100
"""The special tokens of the vocabulary, and the target of tokens that are not predicted."""

TUNING_SEED = 0
SEEDS = (6, 7, 8)

TRIED = (1e-3, 3e-3, 1e-2)
DDP_LR = 3e-3
LR = 3e-3
"""The best inner learning rates, of those that stage ``rates`` tries."""

_TOKEN = re.compile(
    r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9]"
)
"""A token of a SMILES string, as in rxnmapper."""


class Molecules(Text):
    """SMILES strings in an order that depends only on the seed; a tenth of them is for
    validation.

    Rows have equal lengths and lie one behind the other, so that a window is a molecule.
    """

    def __init__(self, rows: Tensor, validation_molecules: int) -> None:
        trained_on = torch.arange(len(rows)) % 10 != 0
        length = rows.shape[1]
        self.training = Windows(_with_next(rows[trained_on]), length)
        self.validation = Windows(_with_next(rows[~trained_on]), length, validation_molecules)

    @override
    def batches(
        self, seed: int, batch: int, first: int = 0, parts: int = 1
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for number, (tokens, _) in enumerate(super().batches(seed, batch, first, parts), first):
            yield masked(tokens, torch.Generator().manual_seed(1_000_000 * seed + number))

    @torch.no_grad()
    @override
    def loss(self, model: nn.Module) -> float:
        """Returns the loss on the validation molecules, in nats per masked token."""
        generator = torch.Generator().manual_seed(0)
        molecules = [self.validation[index][0] for index in range(len(self.validation))]
        losses = []
        for tokens in torch.stack(molecules).split(16):
            loss = next_byte_loss(model, *masked(tokens, generator))
            losses += [float(loss)] * len(tokens)
        return mean(losses)


def _with_next(rows: Tensor) -> Tensor:
    """Returns rows one behind the other, and the token after the last one, which windows have."""
    return torch.cat([rows.flatten(), rows.new_zeros(1)])


def masked(tokens: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Hides `MASKED` tokens of every molecule, which become the only targets."""
    order = torch.rand(tokens.shape, generator=generator)
    order[tokens <= MASK] = -1.0
    hidden = order.topk(MASKED).indices
    targets = torch.full_like(tokens, IGNORED).scatter(1, hidden, tokens.gather(1, hidden))
    return tokens.scatter(1, hidden, MASK), targets


def rows_of(strings: Sequence[str], numbers: dict[str, int]) -> Tensor:
    """Returns the tokens of the strings that have a suitable length and only known tokens."""
    rows = []
    for string in dict.fromkeys(strings):
        tokens = _TOKEN.findall(string)
        is_known = "".join(tokens) == string and numbers.keys() >= set(tokens)
        if is_known and SHORTEST <= len(tokens) <= LONGEST:
            row = [BEGIN, *(numbers[token] for token in tokens), END]
            rows.append(row + [PAD] * (LONGEST + 2 - len(row)))
    return torch.tensor(rows)


@cache
def molecules(validation_molecules: int) -> Molecules:
    vocabulary = (folder_of("rxnmapper") / SHIPPED / "vocab.txt").read_text().split()
    numbers = {token: number for number, token in enumerate(vocabulary)}
    lines = (folder_of("chemicals") / STRINGS).read_text(encoding="utf-8").splitlines()
    strings = [line.split("\t")[4] for line in lines]
    return Molecules(rows_of(strings, numbers), validation_molecules)


def folder_of(package: str) -> Path:
    """Returns the folder of a package without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or version(package) != VERSIONS[package]:
        wanted = f"{package}=={VERSIONS[package]}"
        raise ModuleNotFoundError(
            f"{wanted} is not installed, whose files are measured. Run: pip install --no-deps"
            f" {wanted}"
        )
    return Path(spec.origin).parent


class MaskedLanguageModel(nn.Module):
    """Maps tokens to logits, and does not attend to padding."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.net(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits
        return logits


def adapted(seed: int) -> nn.Module:
    """Returns the shipped model with adapters of peft, without dropout."""
    from peft import LoraConfig, get_peft_model
    from transformers import AlbertForMaskedLM

    shipped = AlbertForMaskedLM.from_pretrained(folder_of("rxnmapper") / SHIPPED)
    assert sum(parameter.numel() for parameter in shipped.parameters()) == PARAMETERS
    torch.manual_seed(seed)
    adapters = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=ADAPTED)
    model = MaskedLanguageModel(get_peft_model(shipped, adapters))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == ADAPTERS
    return model.eval()


@dataclass(frozen=True)
class ShippedTraining(Training):
    """A fine-tuning of a model that a package ships."""

    shipped: str = field(kw_only=True)
    lora_rank: int = field(default=RANK, kw_only=True)

    @property
    @override
    def numel(self) -> int:
        return PARAMETERS

    @override
    def model(self) -> nn.Module:
        return adapted(self.seed)

    @override
    def text(self) -> Text:
        return molecules(self.validation_windows)


def ddp(seed: int = TUNING_SEED, lr: float = DDP_LR) -> ShippedTraining:
    return ShippedTraining(
        SIZE,
        None,
        GROUPS,
        budget=STEPS * GROUPS * BATCH * SIZE.context / PARAMETERS,
        batch=BATCH,
        lr=lr,
        seed=seed,
        validation_windows=VALIDATION_MOLECULES,
        shipped=", ".join(f"{package} {number}" for package, number in VERSIONS.items()),
    )


def ours(seed: int = TUNING_SEED, lr: float = LR) -> ShippedTraining:
    """Two groups by the bare name, whose outer step is elementwise if most values are frozen."""
    sync_every = round_lengths(STEPS)[0]
    choices: dict[str, Any] = {
        "sync_every": sync_every,
        "overlap_steps": overlap_in_round(sync_every),
        "fragments": "strided",
    }
    return replace(ddp(seed, lr), choices=chosen(choices, GROUPS))


def untrained() -> ShippedTraining:
    """The shipped model as it is."""
    return replace(ddp(), budget=0.0)


def rates() -> Iterator[tuple[str, Pair]]:
    """Yields the groups and DDP at each rate."""
    for lr in TRIED:
        yield f"lr={lr:g}", (ours(lr=lr), ddp(lr=lr))


def verdict() -> Iterator[tuple[str, Pair]]:
    """Yields seeds that the other stage did not use, and the model before any training."""
    for seed in SEEDS:
        yield "bare name", (ours(seed), ddp(seed))
        yield "before fine-tuning", (untrained(), ddp(seed))


def quick() -> Iterator[tuple[str, Pair]]:
    yield "quick", (shortened(ours()), shortened(ddp()))


def shortened(training: ShippedTraining) -> ShippedTraining:
    budget = 12 * GROUPS * SIZE.context / PARAMETERS
    return replace(training, budget=budget, batch=1, validation_windows=16)


STAGES: Mapping[str, comparison.Settings] = {"rates": rates, "verdict": verdict}


def main(arguments: list[str] | None = None) -> None:
    subject = f"{STEPS} steps, {ADAPTERS:,} of {PARAMETERS:,} parameters"
    comparison.run_stages("shipped", __doc__, STAGES, quick, subject, arguments)


if __name__ == "__main__":
    main()
