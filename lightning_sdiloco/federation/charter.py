"""The charter: what a run was founded on. Who brings another one is refused, and told what differs."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from lightning_sdiloco.errors import Malformed
from lightning_sdiloco.federation.parsing import (
    CLASS_PATH,
    LONGEST_WORD,
    MOST_FRAGMENTS,
    NAME,
    decoded,
    encoded,
    fields,
    key_of,
    listed,
    number,
    require_sealed,
    sealed,
    text,
    whole,
    word,
    words,
)
from lightning_sdiloco.federation.terms import ChosenQuorum, Terms

MOST_BYTES = 1 << 26
"""How long the text of a charter may be: it names every parameter."""
_SHOWN = 5


@dataclass(frozen=True)
class Charter:
    """Holds what must be the same at all sites, and stays the same as long as the run lasts.

    Args:
        run: The name of the run.
        terms: The numbers of its rules.
        settings: Every setting of the training as text, with no ``"auto"`` left in it.
        fragments: Of each fragment its parameters: names, and what describes shape and dtype.
        shards: Of each fragment the sizes of its shards where ranks must be the same everywhere; otherwise empty.
        versions: The versions of what takes part in the arithmetic.
        self_test: What the arithmetic of a site makes of known values.

    Examples:
        >>> terms = Terms(fragments=1, sync_every=100, overlap_steps=5, grace=2.0)
        >>> ours = Charter("llm", terms, {"compression": "'fp4'"}, ({"weight": "(2, 2)"},), ((),), {}, "5f")
        >>> theirs = Charter("llm", terms, {"compression": "'fp32'"}, ({"weight": "(2, 2)"},), ((),), {}, "60")
        >>> ours.differences(theirs)
        ["settings.compression is 'fp4' here and 'fp32' there", 'self_test is 5f here and 60 there']
    """

    run: str
    terms: Terms
    settings: Mapping[str, str]
    fragments: tuple[Mapping[str, str], ...]
    shards: tuple[tuple[int, ...], ...]
    versions: Mapping[str, str]
    self_test: str

    def described(self) -> dict[str, Any]:
        """Returns it as an object of JSON."""
        return {
            "run": self.run,
            "terms": asdict(self.terms),
            "settings": dict(self.settings),
            # The order of parameters counts too: it is that of the values in a payload.
            "fragments": [[list(entry) for entry in own.items()] for own in self.fragments],
            "shards": [list(sizes) for sizes in self.shards],
            "versions": dict(self.versions),
            "self_test": self.self_test,
        }

    @cached_property
    def key(self) -> str:
        """The key by which charters are told apart; the first record of every fragment names it."""
        return key_of(self.to_bytes())

    def summary(self) -> dict[str, Any]:
        """Returns what is to be said of it in short, as an object of JSON: without the names of parameters."""
        own = self.described() | {"key": self.key, "fragments": len(self.fragments)}
        del own["shards"]
        return own | {"parameters": sum(map(len, self.fragments))}

    def to_bytes(self) -> bytes:
        """Returns its text, with a key, so that no bit of it changes unseen."""
        return sealed(self.described())

    @staticmethod
    def from_bytes(data: bytes) -> "Charter":
        """Reads its text."""
        value = decoded(data, MOST_BYTES)
        if isinstance(value, dict):
            value.pop("key", None)
        read = fields(
            value,
            "charter",
            run=text(NAME),
            terms=_terms,
            settings=words,
            fragments=listed(_parameters, MOST_FRAGMENTS),
            shards=listed(listed(whole(), MOST_FRAGMENTS), MOST_FRAGMENTS),
            versions=words,
            self_test=word,
        )
        charter = Charter(**read)
        require_sealed(data, charter.described())
        return charter

    def differences(self, other: "Charter") -> list[str]:
        """Names what differs from another charter, this one being "here": empty if nothing does."""
        ours, theirs = dict(_leaves(self.described())), dict(_leaves(other.described()))
        return [
            f"{name} is {ours.get(name, 'missing')} here and {theirs.get(name, 'missing')} there"
            for name in dict.fromkeys([*ours, *theirs])
            if ours.get(name) != theirs.get(name)
        ]

    def require_same(self, other: "Charter") -> None:
        """Refuses another charter than this one, which a site has."""
        if different := self.differences(other):
            more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
            raise ValueError(
                f"This site cannot join the run {other.run!r}, which was founded on another charter:"
                f" {'; '.join(different[:_SHOWN])}{more}. All sites must train the same model with the same settings"
                " and versions. Start this one with those of the run."
            )


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted names of all that an object of JSON holds, each with its text."""
    if isinstance(value, dict):
        for key, own in value.items():
            yield from _leaves(own, f"{name}.{key}" if name else key)
    elif isinstance(value, list):
        for index, own in enumerate(value):
            yield from _leaves(own, f"{name}[{index}]")
    else:
        yield name, str(value)


def _parameters(value: Any, name: str) -> Any:
    entries = listed(listed(word, 2), 1 << 20)(value, name)
    if any(len(entry) != 2 for entry in entries) or len({key for key, _ in entries}) < len(entries):
        raise Malformed(f"{name} does not name its parameters once each, with their shapes")
    return dict(entries)


def _terms(value: Any, name: str) -> Any:
    read = fields(
        value,
        name,
        fragments=whole(1, MOST_FRAGMENTS),
        sync_every=whole(1),
        overlap_steps=whole(),
        grace=number,
        lease=number,
        quorum=_quorum,
        rounds=lambda value, name: value if value is None else whole(1)(value, name),
    )
    try:
        return Terms(**read)
    except ValueError as error:
        raise Malformed(str(error)) from None


def _quorum(value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        return whole(1)(value, name)
    if len(encoded(value)) > LONGEST_WORD:
        raise Malformed(f"{name} is longer than {LONGEST_WORD} characters")
    return ChosenQuorum(**fields(value, name, class_path=text(CLASS_PATH), init_args=_object))


def _object(value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise Malformed(f"{name} is no object")
    return value
