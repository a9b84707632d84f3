"""Keys of a federation, and what a hub lets their holders do.

An authority lies in a folder. Each holder has one file that says who it is, in which run, and has a
role: every call passes `peer_of` before anything else is looked at.
"""

import contextlib
import datetime
import hashlib
import os
import re
import ssl
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.codec import NAME
from lightning_sdiloco.federation.store import sync_folder, write_synced
from lightning_sdiloco.federation.wire import OLDEST, PROTOCOL, Denied, Header, extra

Role = Literal["hub", "site", "operator", "reader"]
ROLES: tuple[Role, ...] = get_args(Role)

UNBOUND = (
    "-"  # in place of the run in certificates of an authority that has not been bound to one yet
)

_BLOCKS = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----\n?", re.DOTALL)


class Identity(NamedTuple):
    run: str
    role: str
    name: str

    @property
    def uri(self) -> str:
        """Its form in a certificate, as a subject alternative name."""
        return f"sdiloco://{self.run}/{self.role}/{self.name}"

    @classmethod
    def of_uri(cls, uri: str) -> "Identity | None":
        scheme, _, rest = uri.partition("://")
        parts = rest.split("/")
        if scheme != "sdiloco" or len(parts) != 3 or parts[1] not in ROLES:
            return None
        return cls(*parts)


class Bundle(NamedTuple):
    """What a holder needs to identify itself, and to verify the others. It lacks the authority's
    key.
    """

    identity: Identity
    key: bytes
    certificate: bytes
    authority: bytes
    ends: datetime.datetime
    folder: Path | None = None

    def bound(self, run: str) -> "Bundle":
        """Returns the bundle for a run. An authority that has none yet is bound to it for good."""
        own = self.identity.run if self.folder is None else _run_of(self.folder)
        if own == UNBOUND and self.folder is not None:
            with contextlib.suppress(FileExistsError):
                write_synced(self.folder / "run", f"{checked_name('run', run)}\n".encode())
            own = _run_of(self.folder)
        if own == UNBOUND and self.identity.role == "hub":
            raise ValueError(
                f"The keys of hub {self.identity.name!r} name no run. Start the hub with the"
                " folder of keys, or make"
                " keys for this run: sdiloco keys init FOLDER --run RUN."
            )
        if own not in (run, UNBOUND):
            raise ValueError(
                f"These keys are for run {own!r}, not for run={run!r}: a certificate is valid"
                " for one run. Give the"
                " name of that run, or make keys for this one: sdiloco keys init FOLDER --run RUN."
            )
        if self.identity.role == "hub" and self.identity.run == UNBOUND and self.folder is not None:
            # Sites that are added from now on look for the hub of this run.
            add_keys(self.folder, self.identity.name, role="hub")
            return load(self.folder, self.identity.name)
        return self

    def revoked(self) -> frozenset[str]:
        """Returns the fingerprints of certificates that the authority has taken back."""
        return frozenset() if self.folder is None else _fingerprints(self.folder / "revoked")


def checked_name(what: str, name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{what}={name!r} cannot be a name. It has at most 63 letters, digits, dots, dashes"
            " and underscores, and"
            " begins with a letter or digit."
        )
    return name


def host_of(run: str) -> str:
    """Returns the name under which a hub is known to TLS: by its run, and not by its address,
    which may change.
    """
    return f"{hashlib.sha256(run.encode()).hexdigest()[:32]}.hub.sdiloco.internal"


def fingerprint(certificate: bytes) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode())).hexdigest()


def init_keys(folder: str | Path, run: str | None = None, days: int = 3650) -> Path:
    folder = Path(folder)
    x509 = extra("cryptography.x509")
    if run is not None:
        checked_name("run", run)
    if (folder / "ca.key").exists():
        raise ValueError(
            f"{folder} has keys already, and new ones would shut out their holders. Give another"
            " folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    # Of its certificate's nine uses: it signs certificates, and lists of revoked ones.
    uses = x509.KeyUsage(
        *[False] * 5, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False
    )
    extensions = {x509.BasicConstraints(ca=True, path_length=0): True, uses: True}
    key, certificate = _made(f"sdiloco {run or 'federation'}", days, extensions)
    if run is not None:
        write_synced(folder / "run", f"{run}\n".encode())
    write_synced(folder / "ca.pem", certificate)
    write_synced(folder / "ca.key", key)
    return add_keys(folder, "hub", role="hub")


def add_keys(folder: str | Path, name: str, role: Role = "site", days: int = 365) -> Path:
    """Makes a bundle for a holder. If it had one, that stays valid until it expires, or all of its
    keys are revoked.
    """
    folder = Path(folder)
    x509 = extra("cryptography.x509")
    if role not in ROLES:
        raise ValueError(f"role={role!r} is unknown. Choose one of {', '.join(ROLES)}.")
    try:
        authority_key, authority = ((folder / file).read_bytes() for file in ("ca.key", "ca.pem"))
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no keys yet. Make them: sdiloco keys init {folder}."
        ) from None
    identity = Identity(_run_of(folder), role, checked_name("name", name))
    names = [x509.UniformResourceIdentifier(identity.uri)]
    purposes = [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    if role == "hub":
        # Sites that were added before the run had a name look for it under none.
        names += [x509.DNSName(host) for host in sorted({host_of(identity.run), host_of(UNBOUND)})]
        purposes.append(x509.ExtendedKeyUsageOID.SERVER_AUTH)
    extensions = {
        x509.BasicConstraints(ca=False, path_length=None): True,
        x509.KeyUsage(True, *[False] * 8): True,  # of nine uses: it signs
        x509.ExtendedKeyUsage(purposes): False,
        x509.SubjectAlternativeName(names): False,
    }
    key, certificate = _made(name, days, extensions, authority_key, authority)
    path = folder / f"{name}.bundle"
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    # Noted first, so that it can be taken back whatever becomes of the bundle.
    _add_lines(folder / "issued", [f"{fingerprint(certificate)} {name}"])
    write_synced(part, key + certificate + authority)
    part.replace(path)
    sync_folder(folder)
    return path


def _made(
    name: str,
    days: int,
    extensions: Mapping[Any, bool],
    authority_key: bytes | None = None,
    authority: bytes | None = None,
) -> tuple[bytes, bytes]:
    """Returns a new key, and its certificate with extensions that are critical or not, signed by
    itself or another.
    """
    x509 = extra("cryptography.x509")
    forms = extra("cryptography.hazmat.primitives.serialization")
    curves = extra("cryptography.hazmat.primitives.asymmetric.ec")
    key = curves.generate_private_key(curves.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    # A clock may be some hours wrong.
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(
            subject if authority is None else x509.load_pem_x509_certificate(authority).subject
        )
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day - max(-days, 0) * day)
        .not_valid_after(now + days * day)
    )
    for extension, critical in extensions.items():
        builder = builder.add_extension(extension, critical=critical)
    signer = key if authority_key is None else forms.load_pem_private_key(authority_key, None)
    certificate = builder.sign(signer, extra("cryptography.hazmat.primitives.hashes").SHA256())
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    return bytes(private), bytes(certificate.public_bytes(forms.Encoding.PEM))


def revoke_keys(folder: str | Path, name: str) -> list[str]:
    """Revokes all certificates that a holder was ever given. A hub that was started with the
    folder refuses them.
    """
    folder = Path(folder)
    before = _fingerprints(folder / "revoked", checked_name("name", name))
    taken = sorted(_fingerprints(folder / "issued", name) - before)
    if not taken:
        raise ValueError(f"{folder} has no keys for {name!r} to revoke.")
    _add_lines(folder / "revoked", [f"{one} {name}" for one in taken])
    (folder / f"{name}.bundle").unlink(missing_ok=True)
    return taken


def load(keys: str | Path, name: str = "") -> Bundle:
    """Returns the bundle in a file, which names its holder, or a name's from the authority's
    folder.
    """
    path = Path(keys)
    folder = path if path.is_dir() else None
    if folder is not None and not name:
        raise ValueError(
            f"{keys} is the authority's folder. Give a bundle, such as {path / 'NAME.bundle'}."
        )
    if folder is not None:
        path = folder / f"{checked_name('name', name)}.bundle"
    if not path.is_file():
        made = "" if folder is None else f" Make one: sdiloco keys add {folder} {name}."
        raise ValueError(f"There are no keys at {path}.{made}")
    if path.stat().st_mode & 0o077:
        warnings.warn(f"Other users may read the keys in {path}: chmod 600 {path}", stacklevel=2)
    x509 = extra("cryptography.x509")
    blocks = [(match[1], match[0]) for match in _BLOCKS.finditer(path.read_bytes())]
    if [kind for kind, _ in blocks] != [b"PRIVATE KEY", b"CERTIFICATE", b"CERTIFICATE"]:
        raise ValueError(
            f"{path} is not a bundle: it must hold a key, its certificate and the authority's."
        )
    (_, key), (_, certificate), (_, authority) = blocks
    try:
        parsed = x509.load_pem_x509_certificate(certificate)
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
        identity = Identity.of_uri(uri)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ValueError(f"{path} is not a bundle: {error}") from error
    if identity is None:
        raise ValueError(f"{path} is not a bundle: its certificate is for {uri!r}.")
    ends = parsed.not_valid_after_utc
    if ends < datetime.datetime.now(datetime.timezone.utc):
        raise ValueError(
            f"The certificate in {path} expired on {ends:%Y-%m-%d}. Make another next to the"
            " folder of keys: sdiloco"
            f" keys add FOLDER {identity.name} --role {identity.role}."
        )
    return Bundle(identity, key, certificate, authority, ends, folder)


def _add_lines(path: Path, lines: list[str]) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "w") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def _fingerprints(path: Path, name: str | None = None) -> frozenset[str]:
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return frozenset(line[0] for line in lines if line and name in (None, line[-1]))


def _run_of(folder: Path) -> str:
    path = folder / "run"
    return path.read_text().strip() if path.exists() else UNBOUND


def bundle_of(hub: str, name: str, keys: str | Path | None, insecure: bool) -> Bundle | None:
    if (keys is None) != insecure:
        raise ValueError(
            f"To reach hub {hub}, site {name!r} needs either keys or insecure=True. Ask the"
            " owner of the folder of keys"
            f" for a bundle: sdiloco keys add FOLDER {name}."
        )
    if keys is None:
        return None
    bundle = load(keys, name)
    if bundle.identity.name != name:
        raise ValueError(
            f"The keys belong to {bundle.identity.role} {bundle.identity.name!r}, not to"
            f" {name!r}: a certificate is"
            " valid for one site. Give that site's bundle."
        )
    return bundle


# Callers of a hub

MAY: Mapping[
    str, frozenset[str]
] = {  # which roles may make which call; a call that is not here is refused
    **dict.fromkeys(("ping", "watch", "status"), frozenset(ROLES)),
    **dict.fromkeys(
        ("put", "get", "hello", "contribute", "skip", "state", "give", "leave"), frozenset({"site"})
    ),
    **dict.fromkeys(("evict", "end", "rollback", "amend", "backup"), frozenset({"operator"})),
}

# Calls that speak for no incarnation of a site: the keys of one that trains may be used for them
# elsewhere.
LOOKING = frozenset({"ping", "status", "watch"})


class Peer(NamedTuple):
    role: str
    name: str
    incarnation: str


def peer_of(run: str, bundle: Bundle | None, call: str, header: Header, context: Any) -> Peer:
    """Returns who makes a call to the hub of a run, if it may; without a bundle, the hub believes
    who it says it is.
    """
    who = header.get("from")
    fields = ("run", "role", "name", "incarnation")
    if not isinstance(who, dict) or not all(
        isinstance(who.get(f), str) and len(who[f]) <= 63 for f in fields
    ):
        raise Malformed(
            "the header of a call must say who makes it: run, role, name and incarnation."
        )
    if who.get("protocol") not in range(OLDEST, PROTOCOL + 1):
        other = str(who.get("protocol"))[:20]
        raise Refused(
            f"this hub speaks versions {OLDEST} to {PROTOCOL}, not {other}: update the older"
            " side, a hub before its"
            " sites."
        )
    if who["role"] not in ROLES:
        raise Denied(f"{who['role']!r} is not a role.")
    claimed = Identity(who["run"], who["role"], who["name"])
    if bundle is not None:
        _require_certified(run, bundle, claimed, context)
    if claimed.run != run:
        raise Denied(f"this hub serves run {run!r}, not {claimed.run!r}.")
    if claimed.role not in MAY.get(call, ()):
        raise Denied(
            f"a {claimed.role} may not call {call}: {claimed.name!r} has no certificate for that."
        )
    speaks_for_itself(claimed.role, claimed.name, header.get("about", {}))
    return Peer(claimed.role, claimed.name, who["incarnation"])


def holder_of(context: Any) -> Identity:
    """Returns for whom the certificate of a connection speaks."""
    names = context.auth_context().get("x509_subject_alternative_name", [])
    known = [
        own for name in names if (own := Identity.of_uri(name.decode(errors="replace"))) is not None
    ]
    if len(known) != 1:
        raise Denied("the certificate does not name its run, role and holder.")
    return known[0]


def require_valid(bundle: Bundle, context: Any) -> None:
    """Refuses a certificate that was revoked or has expired since its connection was made."""
    (pem,) = context.auth_context()["x509_pem_cert"]
    revoked = bundle.revoked()
    if revoked and fingerprint(pem) in revoked:
        raise Denied(f"the certificate of {_who(context)} has been revoked.")
    ends = _ends(pem)
    if ends < datetime.datetime.now(datetime.timezone.utc):
        raise Denied(f"the certificate of {_who(context)} expired on {ends:%Y-%m-%d}.")


def _who(context: Any) -> str:
    own = holder_of(context)
    return f"{own.role} {own.name!r}"


def wall_clock() -> float:
    """Returns the seconds of the clock by which certificates are valid; nothing else goes by it."""
    return datetime.datetime.now(datetime.timezone.utc).timestamp()


@cache
def _ends(certificate: bytes) -> datetime.datetime:
    ends: datetime.datetime = (
        extra("cryptography.x509").load_pem_x509_certificate(certificate).not_valid_after_utc
    )
    return ends


def _require_certified(run: str, bundle: Bundle, claimed: Identity, context: Any) -> None:
    own = holder_of(context)
    # An authority that was not bound to a run when it signed has since been bound to this hub's.
    if own.run not in (run, UNBOUND):
        raise Denied(f"this hub serves run {run!r}, but the certificate is for run {own.run!r}.")
    if (own.role, own.name) != (claimed.role, claimed.name):
        raise Denied(
            f"the certificate of {own.role} {own.name!r} is not valid for {claimed.role}"
            f" {claimed.name!r}."
        )
    require_valid(bundle, context)


def speaks_for_itself(role: str, name: str, about: Any) -> Header:
    """Returns what a call is about, if a site that makes it names no other as its own."""
    if not isinstance(about, dict):
        raise Malformed("a call is about a JSON object.")
    if role == "site" and about.get("site", name) != name:
        raise Denied(f"site {name!r} cannot speak for {str(about['site'])[:80]!r}.")
    return about
