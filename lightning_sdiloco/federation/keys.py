"""The keys of a federation and the calls that their holders may make to a hub.

An authority is stored in a folder. Each holder has a bundle file, which contains the holder's run,
role and name. A hub checks every call with `peer_of` before reading anything else.
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
from typing import Literal, NamedTuple, get_args

from lightning_sdiloco.errors import Malformed, Refused
from lightning_sdiloco.federation.codec import NAME
from lightning_sdiloco.federation.store import sync_folder, write_synced
from lightning_sdiloco.federation.wire import (
    OLDEST,
    PROTOCOL,
    Context,
    Denied,
    Extra,
    Header,
    extra,
)

Role = Literal["hub", "site", "operator", "reader"]
ROLES: tuple[Role, ...] = get_args(Role)

# Replaces the run in certificates of an authority that has not yet been bound to a run.
UNBOUND = "-"

_BLOCKS = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----\n?", re.DOTALL)


class Identity(NamedTuple):
    run: str
    role: str
    name: str

    @property
    def uri(self) -> str:
        """The URI that represents the identity in a certificate, as a subject alternative name."""
        return f"sdiloco://{self.run}/{self.role}/{self.name}"

    @classmethod
    def of_uri(cls, uri: str) -> "Identity | None":
        scheme, _, path = uri.partition("://")
        parts = path.split("/")
        if scheme != "sdiloco" or len(parts) != 3 or parts[1] not in ROLES:
            return None
        return cls(*parts)


class Bundle(NamedTuple):
    """The keys that a holder uses to identify itself and to verify its peers. The authority's
    private key is not included.
    """

    identity: Identity
    key: bytes
    certificate: bytes
    authority: bytes
    ends: datetime.datetime
    folder: Path | None = None

    def bound(self, run: str) -> "Bundle":
        """Returns the bundle for a run. An authority without a run is permanently bound to the
        given run.
        """
        bound_run = self._bound_run(run)
        if bound_run == UNBOUND and self.identity.role == "hub":
            raise ValueError(
                f"The keys of hub {self.identity.name!r} are not bound to a run. Start the hub with"
                " the key folder, or create keys for this run: sdiloco keys init FOLDER --run RUN."
            )
        if bound_run not in (run, UNBOUND):
            raise ValueError(
                f"These keys are for run {bound_run!r}, not for run={run!r}: a certificate is valid"
                " for one run. Use the name of that run, or create keys for this run: sdiloco keys"
                " init FOLDER --run RUN."
            )
        if self.identity.role == "hub" and self.identity.run == UNBOUND and self.folder is not None:
            # Sites that are added later look for the hub of this run.
            add_keys(self.folder, self.identity.name, role="hub")
            return load(self.folder, self.identity.name)
        return self

    def _bound_run(self, run: str) -> str:
        """Returns the run to which the keys are bound. An unbound authority is bound first."""
        if self.folder is None:
            return self.identity.run
        if _run_of(self.folder) == UNBOUND:
            with contextlib.suppress(FileExistsError):
                write_synced(self.folder / "run", f"{checked_name('run', run)}\n".encode())
        return _run_of(self.folder)

    def revoked(self) -> frozenset[str]:
        """Returns the fingerprints of certificates that the authority has revoked."""
        return frozenset() if self.folder is None else _fingerprints(self.folder / "revoked")


def checked_name(argument: str, name: str) -> str:
    if not NAME.fullmatch(name):
        raise ValueError(
            f"{argument}={name!r} is not a valid name. A name starts with a letter or digit and has"
            " at most 63 letters, digits, dots, dashes and underscores."
        )
    return name


def host_of(run: str) -> str:
    """Returns the TLS host name of a hub. The name depends only on the run, because the hub's
    address may change.
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
            f"{folder} already contains keys, and new keys would lock out the current holders."
            " Choose a different folder."
        )
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    # Of the nine key usages, this certificate has two: signing certificates and revocation lists.
    uses = x509.KeyUsage(
        *[False] * 5, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False
    )
    extensions = {x509.BasicConstraints(ca=True, path_length=0): True, uses: True}
    key, certificate = _key_pair(f"sdiloco {run or 'federation'}", days, extensions)
    if run is not None:
        write_synced(folder / "run", f"{run}\n".encode())
    write_synced(folder / "ca.pem", certificate)
    write_synced(folder / "ca.key", key)
    return add_keys(folder, "hub", role="hub")


def add_keys(folder: str | Path, name: str, role: Role = "site", days: int = 365) -> Path:
    """Creates a key bundle for a holder. Earlier bundles remain valid until they expire or until
    all of the holder's keys are revoked.
    """
    folder = Path(folder)
    if role not in ROLES:
        raise ValueError(f"role={role!r} is unknown. Choose one of {', '.join(ROLES)}.")
    try:
        authority_key = (folder / "ca.key").read_bytes()
        authority = (folder / "ca.pem").read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"{folder} does not contain keys yet. Create keys: sdiloco keys init {folder}."
        ) from None
    identity = Identity(_run_of(folder), role, checked_name("name", name))
    extensions = _extensions(identity)
    key, certificate = _key_pair(name, days, extensions, authority_key, authority)
    path = folder / f"{name}.bundle"
    _require_role(path, role)
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    # The fingerprint is recorded first so that the certificate can be revoked whatever happens to
    # the bundle.
    _add_lines(folder / "issued", [f"{fingerprint(certificate)} {name}"])
    write_synced(part, key + certificate + authority)
    part.replace(path)
    sync_folder(folder)
    return path


def _require_role(path: Path, role: Role) -> None:
    """Raises ValueError if a holder's bundle would be replaced by one for a different role."""
    if not path.exists():
        return
    _, certificate, _ = _blocks_of(path)
    holder, _ = _certified(path, certificate)
    if holder.role != role:
        raise ValueError(
            f"{path} contains the keys of {holder.role} {holder.name}, and keys for a {role} of"
            " that name would replace them. Choose a different name, or renew the existing keys:"
            f" sdiloco keys add {path.parent} {holder.name} --role {holder.role}."
        )


def _extensions(identity: Identity) -> dict[Extra, bool]:
    """Returns the extensions for a holder's certificate. A value of True marks a critical
    extension.
    """
    x509 = extra("cryptography.x509")
    names = [x509.UniformResourceIdentifier(identity.uri)]
    purposes = [x509.ExtendedKeyUsageOID.CLIENT_AUTH]
    if identity.role == "hub":
        # Sites that were added before the authority was bound look for the hub of an unbound
        # authority.
        names += [x509.DNSName(host) for host in sorted({host_of(identity.run), host_of(UNBOUND)})]
        purposes.append(x509.ExtendedKeyUsageOID.SERVER_AUTH)
    return {
        x509.BasicConstraints(ca=False, path_length=None): True,
        x509.KeyUsage(True, *[False] * 8): True,  # of the nine usages, only signing
        x509.ExtendedKeyUsage(purposes): False,
        x509.SubjectAlternativeName(names): False,
    }


def _key_pair(
    name: str,
    days: int,
    extensions: Mapping[Extra, bool],
    authority_key: bytes | None = None,
    authority: bytes | None = None,
) -> tuple[bytes, bytes]:
    """Creates a key and a certificate that is signed by the key itself or by an authority."""
    forms = extra("cryptography.hazmat.primitives.serialization")
    curves = extra("cryptography.hazmat.primitives.asymmetric.ec")
    key = curves.generate_private_key(curves.SECP256R1())
    builder = _unsigned(name, days, authority).public_key(key.public_key())
    for extension, critical in extensions.items():
        builder = builder.add_extension(extension, critical=critical)
    signer = key if authority_key is None else forms.load_pem_private_key(authority_key, None)
    certificate = builder.sign(signer, extra("cryptography.hazmat.primitives.hashes").SHA256())
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())
    return bytes(private), bytes(certificate.public_bytes(forms.Encoding.PEM))


def _unsigned(name: str, days: int, authority: bytes | None) -> Extra:
    """Returns a builder for an unsigned certificate without a key."""
    x509 = extra("cryptography.x509")
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    issuer = subject if authority is None else x509.load_pem_x509_certificate(authority).subject
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        # Valid from a day ago, because a clock may be some hours wrong.
        .not_valid_before(now - day - max(-days, 0) * day)
        .not_valid_after(now + days * day)
    )


def revoke_keys(folder: str | Path, name: str) -> list[str]:
    """Revokes all certificates ever issued to a holder. A hub that was started with the key folder
    rejects them.
    """
    folder = Path(folder)
    earlier = _fingerprints(folder / "revoked", checked_name("name", name))
    revoked = sorted(_fingerprints(folder / "issued", name) - earlier)
    if not revoked:
        raise ValueError(f"{folder} has no keys for {name!r} to revoke.")
    _add_lines(folder / "revoked", [f"{digest} {name}" for digest in revoked])
    (folder / f"{name}.bundle").unlink(missing_ok=True)
    return revoked


def load(keys: str | Path, name: str = "") -> Bundle:
    """Loads a bundle from a file, or the bundle for ``name`` from the authority's folder."""
    path = Path(keys)
    folder = None
    if path.is_dir():
        if not name:
            raise ValueError(
                f"{keys} is the authority's folder. Use a bundle, such as {path / 'NAME.bundle'}."
            )
        folder = path
        path = folder / f"{checked_name('name', name)}.bundle"
    if not path.is_file():
        advice = "" if folder is None else f" Create a bundle: sdiloco keys add {folder} {name}."
        raise ValueError(f"There are no keys at {path}.{advice}")
    if path.stat().st_mode & 0o077:
        warnings.warn(
            f"Other users can read the keys in {path}. To prevent this, run: chmod 600 {path}",
            stacklevel=2,
        )
    key, certificate, authority = _blocks_of(path)
    identity, ends = _certified(path, certificate)
    if ends < datetime.datetime.now(datetime.timezone.utc):
        raise ValueError(
            f"The certificate in {path} expired on {ends:%Y-%m-%d}. Create a new bundle on the"
            f" machine with the key folder: sdiloco keys add FOLDER {identity.name} --role"
            f" {identity.role}."
        )
    return Bundle(identity, key, certificate, authority, ends, folder)


def _blocks_of(path: Path) -> list[bytes]:
    """Returns the key, the certificate and the authority's certificate from a bundle."""
    blocks = list(_BLOCKS.finditer(path.read_bytes()))
    if [block[1] for block in blocks] != [b"PRIVATE KEY", b"CERTIFICATE", b"CERTIFICATE"]:
        raise ValueError(
            f"{path} is not a bundle: it must contain a key, its certificate and the authority's."
        )
    return [block[0] for block in blocks]


def _certified(path: Path, certificate: bytes) -> tuple[Identity, datetime.datetime]:
    """Returns the holder and the expiry time of a certificate."""
    x509 = extra("cryptography.x509")
    try:
        parsed = x509.load_pem_x509_certificate(certificate)
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
        identity = Identity.of_uri(uri)
    except (ValueError, x509.ExtensionNotFound) as error:
        raise ValueError(f"{path} is not a bundle: {error}") from error
    if identity is None:
        raise ValueError(f"{path} is not a bundle: its certificate is for {uri!r}.")
    return identity, parsed.not_valid_after_utc


def _add_lines(path: Path, lines: list[str]) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "w") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def _fingerprints(path: Path, name: str | None = None) -> frozenset[str]:
    if not path.exists():
        return frozenset()
    lines = [line.split() for line in path.read_text().splitlines()]
    return frozenset(words[0] for words in lines if words and name in (None, words[-1]))


def _run_of(folder: Path) -> str:
    path = folder / "run"
    return path.read_text().strip() if path.exists() else UNBOUND


def bundle_of(hub: str, name: str, keys: str | Path | None, insecure: bool) -> Bundle | None:
    if (keys is None) != insecure:
        raise ValueError(
            f"To reach hub {hub}, site {name!r} needs either keys or insecure=True. Ask the owner"
            f" of the key folder for a bundle: sdiloco keys add FOLDER {name}."
        )
    if keys is None:
        return None
    bundle = load(keys, name)
    if bundle.identity.name != name:
        raise ValueError(
            f"The keys belong to {bundle.identity.role} {bundle.identity.name!r}, not to {name!r}:"
            " a certificate is valid for one site. Use that site's bundle."
        )
    return bundle


# Callers of a hub

# The roles that may make each call; a call that is not listed is refused.
MAY: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("ping", "watch", "status"), frozenset(ROLES)),
    **dict.fromkeys(
        ("put", "get", "hello", "contribute", "skip", "state", "give", "leave"), frozenset({"site"})
    ),
    **dict.fromkeys(("evict", "end", "rollback", "amend", "backup"), frozenset({"operator"})),
}

# These calls do not depend on the incarnation of a site, so another process may make them with the
# keys of a training site.
LOOKING = frozenset({"ping", "status", "watch"})


class Peer(NamedTuple):
    role: str
    name: str
    incarnation: str


def peer_of(run: str, bundle: Bundle | None, call: str, header: Header, context: Context) -> Peer:
    """Returns the caller if the call is permitted, and raises an error otherwise. Without a bundle,
    the hub trusts the header.
    """
    caller = header.get("from")
    fields = ("run", "role", "name", "incarnation")
    if not isinstance(caller, dict) or not all(
        isinstance(caller.get(field), str) and len(caller[field]) <= 63 for field in fields
    ):
        raise Malformed(
            "the header of a call must identify the caller by run, role, name and incarnation."
        )
    protocol = caller.get("protocol")
    if protocol not in range(OLDEST, PROTOCOL + 1):
        raise Refused(
            f"this hub supports versions {OLDEST} to {PROTOCOL}, not {str(protocol)[:20]}. Update"
            " the older side, and update a hub before its sites."
        )
    if caller["role"] not in ROLES:
        raise Denied(f"{caller['role']!r} is not a valid role.")
    claimed = Identity(caller["run"], caller["role"], caller["name"])
    if bundle is not None:
        _require_certified(run, bundle, claimed, context)
    if claimed.run != run:
        raise Denied(f"this hub serves run {run!r}, not {claimed.run!r}.")
    if claimed.role not in MAY.get(call, ()):
        raise Denied(
            f"{claimed.name!r} may not call {call}: the role {claimed.role} does not permit it."
        )
    speaks_for_itself(claimed.role, claimed.name, header.get("about", {}))
    return Peer(claimed.role, claimed.name, caller["incarnation"])


def holder_of(context: Context) -> Identity:
    """Returns the holder of a connection's certificate."""
    holders = []
    for name in context.auth_context().get("x509_subject_alternative_name", []):
        identity = Identity.of_uri(name.decode(errors="replace"))
        if identity is not None:
            holders.append(identity)
    if len(holders) != 1:
        raise Denied("the certificate does not name a run, role and holder.")
    return holders[0]


def require_valid(bundle: Bundle, context: Context) -> None:
    """Raises Denied if a certificate was revoked or has expired since the connection was made."""
    (pem,) = context.auth_context()["x509_pem_cert"]
    revoked = bundle.revoked()
    if revoked and fingerprint(pem) in revoked:
        raise Denied(f"the certificate of {_named(holder_of(context))} has been revoked.")
    ends = _ends(pem)
    if ends < datetime.datetime.now(datetime.timezone.utc):
        raise Denied(f"the certificate of {_named(holder_of(context))} expired on {ends:%Y-%m-%d}.")


def _named(identity: Identity) -> str:
    return f"{identity.role} {identity.name!r}"


def wall_clock() -> float:
    """Returns the UTC time in seconds. Use this clock for certificates and epochs only."""
    return datetime.datetime.now(datetime.timezone.utc).timestamp()


@cache
def _ends(certificate: bytes) -> datetime.datetime:
    ends: datetime.datetime = (
        extra("cryptography.x509").load_pem_x509_certificate(certificate).not_valid_after_utc
    )
    return ends


def _require_certified(run: str, bundle: Bundle, claimed: Identity, context: Context) -> None:
    holder = holder_of(context)
    # An authority that was unbound when it signed has since been bound to this hub's run.
    if holder.run not in (run, UNBOUND):
        raise Denied(f"this hub serves run {run!r}, but the certificate is for run {holder.run!r}.")
    if (holder.role, holder.name) != (claimed.role, claimed.name):
        raise Denied(f"the certificate of {_named(holder)} is not valid for {_named(claimed)}.")
    require_valid(bundle, context)


def speaks_for_itself(role: str, name: str, about: object) -> Header:
    """Returns the part of a header that describes the call. Raises Denied if a site names another
    site.
    """
    if not isinstance(about, dict):
        raise Malformed("the description of a call must be a JSON object.")
    if role == "site" and about.get("site", name) != name:
        raise Denied(f"site {name!r} cannot act on behalf of {str(about['site'])[:80]!r}.")
    return about
