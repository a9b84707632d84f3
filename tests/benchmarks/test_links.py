"""The slow links that benchmarks run on."""

import subprocess
import sys
import time

import pytest

from benchmarks.links import Links, missing

SERVE = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    total = 0
    while data := connection.recv(1 << 16):
        total += len(data)
    connection.sendall(str(total).encode())
"""
SEND = """
import socket, sys, time
start = time.monotonic()
with socket.create_connection(("site0", 7000)) as connection:
    round_trip = time.monotonic() - start
    connection.sendall(bytes(int(sys.argv[1])))
    connection.shutdown(socket.SHUT_WR)
    assert int(connection.recv(100)) == int(sys.argv[1])
print(round_trip, time.monotonic() - start, socket.gethostname())
"""


REACHES = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=1.5).sendall(b'.')"


@pytest.mark.network
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_link_is_as_slow_as_asked_is_cut_and_healed_and_leaves_nothing_behind() -> None:
    nbytes = 1_000_000
    with Links(sites=2, rate=40e6, one_way_delay=0.03) as links:
        server = links.start(0, [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        words = links.command(1, [sys.executable, "-c", SEND, str(nbytes)])
        told = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout.split()
        server.wait(timeout=10)
    assert float(told[0]) >= 0.06, "a round trip"
    assert float(told[1]) >= nbytes * 8 / 40e6
    assert told[2] == "site1"

    with Links(sites=2, rate=None, one_way_delay=0.0) as links:
        words = [sys.executable, "-m", "http.server", "7000"]
        servers = [links.start(site, words, stderr=subprocess.DEVNULL) for site in (0, 1)]

        def reaches(site: int, other: int) -> bool:
            words = links.command(site, [sys.executable, "-c", REACHES, links.address(other)])
            return subprocess.run(words, check=False, capture_output=True, timeout=30).returncode == 0

        deadline = time.monotonic() + 30
        while not (reaches(0, 1) and reaches(1, 0)):
            assert time.monotonic() < deadline
        links.change(1, cut_in=True)
        assert not reaches(1, 0)
        links.change(1, cut_in=False, nat=True)
        assert (reaches(1, 0), reaches(0, 1)) == (True, False), "a NAT lets only answers in"
        for server in servers:
            server.kill()
    left = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    assert not any(name in left for name in links.names)
