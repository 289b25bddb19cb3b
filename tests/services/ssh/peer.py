"""Three hosts behind one real `sshd`, and a proxy between `ssh` and them that fails on cue.

The proxy sees encrypted bytes only. Which verb a connection is for, it reads from the command line of the `ssh` process
that opened it. A fault sends the connection to another port of the daemon (a host that refuses the key, has no Python,
has forgotten its runs, or speaks another version), to a daemon with another host key, or cuts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Lock, Thread

from atoll.replica import processes
from atoll.testing.bench import Call, Fault
from services.peer_faults import PeerFaults, Rule
from services.programs import free_ports
from services.ssh.daemon import Login, make_key, public_key, sshd

HOSTS = 3
VAULT = ("CONTRACT_VAULT", "hunter2 hunter3")
"""A variable that a login at each host has, and its value."""
_FOUND_S = 30.0
"""How long the proxy looks for the process that has opened a connection, while that keeps it open."""
_OTHER_VERSION = json.dumps({"protocol": 99, "atoll": "99.0.0", "ok": {}})


class Route(Exception):
    """Where a connection goes instead: to another port, or nowhere after `cut_after` bytes of the client."""

    def __init__(self, place: str = "", cut_after: int | None = None) -> None:
        super().__init__(place)
        self.place, self.cut_after = place, cut_after


class Faults(PeerFaults):
    """Faults of hosts, by the verb of the call."""

    kinds = {"start": Call.CREATE, "status": Call.DESCRIBE, "watch": Call.DESCRIBE, "stop": Call.STOP, "logs": Call.LOG}  # noqa: RUF012

    def answer(self, operation: str, fault: Fault) -> Exception:
        is_read = self.kinds.get(operation) in (Call.DESCRIBE, Call.LOG)
        return {
            Fault.UNAUTHORIZED: Route("refusing"),
            Fault.FORBIDDEN: Route("impostor"),
            Fault.NOT_FOUND: Route("empty" if is_read else "bare"),
            Fault.CONFLICT: Route("other version"),
            Fault.THROTTLED: Route(cut_after=0),
            Fault.BROKEN: Route(cut_after=600),
        }[fault]


class Peer:
    """The daemons, the proxy, and the files that a client needs, in a folder. Close it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.faults = folder, Faults()
        self.calls: Counter[str] = Counter()
        self._stack, self._lock = ExitStack(), Lock()
        self._open: set[socket.socket] = set()
        self._held: dict[int, tuple[str, list[Rule]]] = {}
        """Port of a connection to a daemon -> the rules that apply after the effect of its call."""
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=128) for _ in range(HOSTS + 1)]
        *fronts, control = (listener.getsockname()[1] for listener in self._listeners)
        self.hosts = [f"127.0.0.1:{port}" for port in fronts]
        self.homes = {host: folder / f"host{number}" for number, host in enumerate(self.hosts)}
        try:
            self._start_daemons(control)
        except BaseException:
            self._stack.close()
            raise
        for number, listener in enumerate(self._listeners):
            serve = self._control if number == HOSTS else None
            Thread(target=self._accept, args=(listener, number, serve), daemon=True).start()

    def _start_daemons(self, control: int) -> None:
        keys = {name: make_key(self.folder / name) for name in ("host_key", "other_key", "user_key")}
        names = ["refusing", "empty", "bare", "other version", *(f"host {n}" for n in range(HOSTS))]
        names += [f"held {n}" for n in range(HOSTS)]
        self._ports = dict(zip([*names, "impostor"], free_ports(len(names) + 1), strict=True))
        wrapper = f"exec {sys.executable} -S {Path(__file__).with_name('wrapped.py')} {control}"
        logins = [
            Login(self._ports["refusing"], refuses=True),
            Login(self._ports["empty"], self._variables(self.folder / "empty")),
            Login(self._ports["bare"], command="exec /no/such/python"),
            Login(self._ports["other version"], command=f"read -r line; echo 'atoll-host: {_OTHER_VERSION}'"),
        ]
        for number, home in enumerate(self.homes.values()):
            home.mkdir()
            logins.append(Login(self._ports[f"host {number}"], self._variables(home)))
            logins.append(Login(self._ports[f"held {number}"], self._variables(home), command=wrapper))
        user = keys["user_key"]
        self._stack.enter_context(sshd(self.folder, "hosts", logins, host_key=keys["host_key"], user_key=user))
        other = [Login(self._ports["impostor"])]
        self._stack.enter_context(sshd(self.folder, "impostor", other, host_key=keys["other_key"], user_key=user))
        known = [f"[127.0.0.1]:{host.rpartition(':')[2]} {public_key(keys['host_key'])}" for host in self.hosts]
        (self.folder / "known_hosts").write_text("\n".join(known) + "\n")
        self.config = self.folder / "config"
        self.config.write_text(
            f"Host *\n  UserKnownHostsFile {self.folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
            f"  IdentityFile {user}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        )

    def _variables(self, home: Path) -> dict[str, str]:
        # With a home of its own, the shell of a login reads no file of the user who runs the tests.
        return {"HOME": str(home), "ATOLL_HOME": str(home), VAULT[0]: VAULT[1], "PYTHONDONTWRITEBYTECODE": "1"}

    def running(self) -> list[tuple[int, str]]:
        """The processes of runs on the hosts, each with its label."""
        return [(pid, label) for pid, label in processes.labelled() if label.startswith(f"{self.folder}{os.sep}")]

    def reset(self) -> list[tuple[int, str]]:
        """As new; returns the processes that a test has left, and ends them."""
        self.faults.heal()
        self.calls.clear()
        left = self.running()
        for _, label in left:
            processes.kill_all(label)
        for home in self.homes.values():
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir()
        return left

    def close(self) -> None:
        self.faults.heal()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self._stack.close()

    def cut_all(self) -> None:
        """Cut every connection that is open now."""
        with self._lock:
            for client in self._open:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)

    # ── the proxy ───────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self, listener: socket.socket, number: int, serve: object) -> None:
        while True:
            try:
                client, (_, port) = listener.accept()
            except OSError:
                return
            args = (client,) if serve is not None else (client, port, number)
            target = self._control if serve is not None else self._connection
            name = f"process_request_thread {number}"  # as in a server of the standard library: not a leak of a test
            Thread(target=target, args=args, daemon=True, name=name).start()

    def _connection(self, client: socket.socket, port: int, number: int) -> None:
        verb = _verb_of(client, port)
        with self._lock:
            self.calls[verb] += 1
            self._open.add(client)
        met = self.faults.met(verb, self.hosts[number])
        later = [rule for rule in met if rule.after_effect]
        place, cut_after = f"held {number}" if later else f"host {number}", None
        with client:
            try:
                for rule in met:
                    if not rule.after_effect:
                        rule.act(verb)
            except Route as route:
                place, cut_after = route.place or place, route.cut_after
            if cut_after == 0:
                return
            with socket.create_connection(("127.0.0.1", self._ports[place])) as server:
                if later:
                    with self._lock:
                        self._held[server.getsockname()[1]] = (verb, later)
                back = Thread(target=_pump, args=(server, client), daemon=True, name="process_request_thread back")
                back.start()
                _pump(client, server, cut_after)
                if cut_after is None:
                    back.join(60)
            with self._lock:
                self._open.discard(client)

    def _control(self, client: socket.socket) -> None:
        """A call that has had its effect asks whether its answer is sent."""
        with client, contextlib.suppress(OSError):
            port = int(client.makefile().readline())
            with self._lock:
                verb, rules = self._held.pop(port)
            try:
                for rule in rules:
                    rule.act(verb)
            except Route:
                client.sendall(b"drop\n")
            else:
                client.sendall(b"answer\n")


def _pump(source: socket.socket, sink: socket.socket, cut_after: int | None = None) -> None:
    """Copy bytes until the end; after `cut_after` bytes, cut the connection with a reset."""
    copied = 0
    with contextlib.suppress(OSError):
        while block := source.recv(1 << 16):
            copied += len(block)
            if cut_after is not None and copied > cut_after:
                for end in (source, sink):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return
            sink.sendall(block)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def _verb_of(client: socket.socket, port: int) -> str:
    """The last word of the command line of the `ssh` process whose connection comes from this port.

    The kernel may list a connection late, and one read of its list may leave lines out, so it is read again.
    """
    host_port = client.getsockname()[1]
    deadline = time.monotonic() + _FOUND_S
    while time.monotonic() < deadline and not _is_closed(client):
        inodes = {f"socket:[{inode}]" for inode in _inodes(port, host_port)}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not entry.name.isdecimal() or (entry / "comm").read_text() != "ssh\n":
                    continue
                if any(os.readlink(each) in inodes for each in (entry / "fd").iterdir()):
                    return (entry / "cmdline").read_bytes().decode().rstrip("\0").rpartition(" ")[2]
        time.sleep(0.02)
    return "unknown"  # such as a probe of the port, or a process that has ended


def _is_closed(client: socket.socket) -> bool:
    """Whether the other side has closed the connection, also if it has sent bytes before."""
    poll = select.poll()
    poll.register(client, select.POLLRDHUP)
    return bool(poll.poll(0))


def _inodes(*ports: int) -> Iterator[str]:
    """The inode of the socket with this local and this remote port. The local port alone may have several sockets."""
    ends = [f"0100007F:{port:04X}" for port in ports]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == ends:
            yield fields[9]
