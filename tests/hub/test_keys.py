"""Keys: what is in a bundle, for which run it speaks, and what is refused before a connection is made."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_sdiloco.federation import Hub, HubClient, add_keys, init_keys, revoke_keys
from lightning_sdiloco.federation.keys import UNBOUND, Identity, fingerprint, load
from lightning_sdiloco.tools.cli import main
from tests.hub.hubs import RUN, require_extra


def test_a_bundle_says_who_its_holder_is_and_holds_no_key_of_the_authority(keys: Path) -> None:
    authority = (keys / "ca.key").read_bytes()
    for name, role in (("hub", "hub"), ("site-a", "site"), ("boss", "operator"), ("viewer", "reader")):
        bundle = load(keys / f"{name}.bundle")
        assert bundle.identity == Identity(RUN, role, name)
        content = (keys / f"{name}.bundle").read_bytes()
        assert content.count(b"PRIVATE KEY-----") == 2
        assert authority.split(b"\n")[1] not in content


def test_nobody_else_can_read_keys(keys: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys.iterdir()} == {0o600}
    copy = tmp_path / "copy.bundle"
    copy.write_bytes((keys / "site-a.bundle").read_bytes())
    copy.chmod(0o644)
    with pytest.warns(UserWarning, match=f"chmod 600 {copy}"):
        load(copy)


def test_the_commands_make_keys_and_refuse(keys: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "keys")
    main(["keys", "init", folder])
    main(["keys", "add", folder, "site-a", "site-b"])
    main(["keys", "add", folder, "boss", "--role", "operator"])
    assert "site-b.bundle: for site site-b" in capsys.readouterr().out
    # The run is that of the first hub. Sites may have got their bundles before.
    assert load(folder, "site-b").identity.run == UNBOUND
    assert load(folder).bound("llm-7b").identity == Identity("llm-7b", "hub", "hub")
    load(folder, "site-b").bound("llm-7b")
    with pytest.raises(ValueError, match="for run 'llm-7b', and not for run='other'"):
        load(folder).bound("other")
    main(["keys", "add", folder, "site-c"])
    assert load(folder, "site-c").identity.run == "llm-7b"
    main(["keys", "revoke", folder, "site-c"])
    assert len(load(folder).revoked()) == 1
    empty = str(tmp_path / "empty")
    for arguments, told in (
        (["init", str(keys)], "has keys already"),
        (["init", empty, "--run", "a/b"], "run='a/b' cannot be a name"),
        (["add", empty, "site"], "has no keys yet"),
        (["add", str(keys), "../site"], "cannot be a name"),
        (["add", str(keys), "site", "--days", "0"], "days=0 is out of range"),
        (["add", str(keys), "site", "--role", "king"], "role"),
        (["add", str(keys)], "names"),
        (["revoke", str(keys), "nobody"], "has made no keys for 'nobody'"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["keys", *arguments])
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


def test_what_is_refused_before_a_connection_is_made(keys: Path, tmp_path: Path) -> None:
    other = init_keys(tmp_path / "other", "other-run")
    expired = add_keys(keys, "late", days=-1)
    half = tmp_path / "half.bundle"
    half.write_bytes((keys / "site-a.bundle").read_bytes()[:700])
    half.chmod(0o600)
    for name, options, told in (
        ("site-a", {}, "either keys or insecure=True"),
        ("site-a", {"keys": keys, "insecure": True}, "either keys or insecure=True"),
        ("site-a", {"keys": keys / "site-b.bundle"}, "those of site 'site-b', and not of 'site-a'"),
        ("hub", {"keys": other}, "for run 'other-run', and not for run='run-1'"),
        ("late", {"keys": expired}, "expired on"),
        ("site-a", {"keys": half}, "is no bundle"),
        ("site-a", {"keys": tmp_path / "nothing.bundle"}, "There are no keys at"),
    ):
        with pytest.raises(ValueError, match=told):
            HubClient("127.0.0.1:1", RUN, name, **options)
    with pytest.raises(ValueError, match="either keys or insecure=True"):
        Hub(None, None, RUN)
    with pytest.raises(ValueError, match="those of site 'site-a', and a hub needs its own"):
        Hub(None, None, RUN, keys=keys / "site-a.bundle")
    # A hub that has its bundle alone cannot bind the others to a run.
    with pytest.raises(ValueError, match="Start the hub with the folder of keys"):
        load(init_keys(tmp_path / "keys")).bound(RUN)


def test_a_holder_may_get_new_keys_before_the_old_ones_are_taken_back(tmp_path: Path) -> None:
    require_extra()
    init_keys(tmp_path, RUN)
    old, new = (load(add_keys(tmp_path, "site-a")).certificate for _ in range(2))
    add_keys(tmp_path, "site-b")
    # An old one that leaked goes too.
    assert sorted(revoke_keys(tmp_path, "site-a")) == sorted(map(fingerprint, (old, new)))
    assert load(tmp_path).revoked() == {fingerprint(old), fingerprint(new)}
    assert not (tmp_path / "site-a.bundle").exists()
    with pytest.raises(ValueError, match="could be revoked"):
        revoke_keys(tmp_path, "site-a")
    newest = load(add_keys(tmp_path, "site-a")).certificate
    assert revoke_keys(tmp_path, "site-a") == [fingerprint(newest)]


WITHOUT = """
import sys
for name in ("grpc", "cryptography"):
    sys.modules[name] = None
import lightning_sdiloco
from lightning_sdiloco.federation import BlobStore, Hub, HubClient, init_keys
store = BlobStore(sys.argv[1] + "/store")
assert store.get(store.put(b"blob")) == b"blob"
for wanted, make in (
    ("grpcio", lambda: HubClient("127.0.0.1:1", "run", "site", insecure=True)),
    ("grpcio", lambda: Hub(None, None, "run", insecure=True)),
    ("cryptography", lambda: init_keys(sys.argv[1] + "/keys")),
):
    try:
        make()
    except ValueError as error:
        assert f"needs {wanted}, which is not installed" in str(error), error
        assert "pip install 'lightning-sdiloco[federated]'" in str(error), error
    else:
        raise AssertionError(wanted)
"""


def test_without_the_extra_all_can_be_imported_and_says_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, tmp_path], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
