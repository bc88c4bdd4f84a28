"""A small network for tests: machines `a`, `b`, `c` and one with the stores, whose links can be cut and made slow.

`Namespaces`: each machine is a network namespace with a link of its own (a veth pair) to that of the stores, which is
the only way between them: 10.0.N.1 is where machine N finds the stores. Nothing of the host's own network is touched.
The namespaces have no names: this process holds them open, and when it ends, however it does, they are gone.
`Loopback`: where namespaces cannot be made, one host, and a proxy as each link. Its machines are not apart, but a link
can be cut and made slow in the same words.

Whoever is `inside` a place makes sockets and starts processes there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from typing import Final, Protocol

from tests.tiers.proxy import Mood, Proxy

MACHINES: Final = ("a", "b", "c")
STORES: Final = "stores"
CLONE_NEWNET: Final = 0x40000000


class Network(Protocol):
    """What tests do with a network. `rate` is in bytes a second."""

    def inside(self, place: str) -> contextlib.AbstractContextManager[None]: ...

    def path(self, place: str) -> str:
        """For `enter` in another process; empty where there is nothing to be entered."""

    def address(self, machine: str, port: int) -> tuple[str, int]:
        """Where that machine finds a server that listens on that port among the stores."""

    def cut(self, machine: str) -> None: ...

    def slow(self, machine: str, rate: int) -> None: ...

    def lossy(self, machine: str) -> None: ...

    def mend(self, machine: str) -> None: ...

    def lost(self, machine: str) -> int:
        """Packets that its link has lost since it became `lossy`."""

    def close(self) -> None: ...


def enter(path: str) -> None:
    """The calling thread, and all that it starts from now on, is in that namespace."""
    if path:
        with open(path, "rb") as namespace:
            _check(_libc.setns(namespace.fileno(), CLONE_NEWNET))


_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _new_namespace() -> int:
    """A file descriptor that keeps it. Made by a thread that ends, so that no other one is in it."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            _check(_libc.unshare(CLONE_NEWNET))
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


def obstacle() -> str:
    """Why network namespaces cannot be made here; empty: they can."""
    if not shutil.which("ip") or not shutil.which("tc"):
        return "the commands ip and tc are not installed (Debian: apt-get install iproute2)"
    try:
        network = Namespaces()
    except (OSError, AssertionError) as error:
        return f"this system does not allow network namespaces: {error}"
    network.close()
    return ""


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


class Namespaces:
    """See the module. The processes inside must have ended before it is closed."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._shaping = "tbf"
        try:
            for place in (STORES, *MACHINES):
                self._places[place] = _new_namespace()
                self._ip(place, "link", "set", "dev", "lo", "up")
            for number, machine in enumerate(MACHINES, start=1):
                self._link(machine, number)
            self._shaping = self._shaper()
        except BaseException:
            self.close()
            raise

    def _ip(self, place: str, *words: str) -> None:
        with self.inside(place):
            _run("ip", *words)

    def _link(self, machine: str, number: int) -> None:
        far = f"to-{machine}"
        self._ip(machine, "link", "add", "up0", "type", "veth", "peer", "name", far, "netns", self.path(STORES))
        self._ip(machine, "address", "add", f"10.0.{number}.2/24", "dev", "up0")
        self._ip(STORES, "address", "add", f"10.0.{number}.1/24", "dev", far)
        self._ip(machine, "link", "set", "dev", "up0", "up")
        self._ip(STORES, "link", "set", "dev", far, "up")

    def _shaper(self) -> str:
        """`netem`, where the kernel has it, loses packets at random; `tbf` those that its queue does not take."""
        try:
            self._shape("a", "netem", "delay", "1ms")
        except AssertionError:
            return "tbf"
        self.mend("a")
        return "netem"

    @contextlib.contextmanager
    def inside(self, place: str) -> Iterator[None]:
        with open("/proc/thread-self/ns/net", "rb") as before:
            enter(self.path(place))
            try:
                yield
            finally:
                _check(_libc.setns(before.fileno(), CLONE_NEWNET))

    def path(self, place: str) -> str:
        return f"/proc/{os.getpid()}/fd/{self._places[place]}"

    def address(self, machine: str, port: int) -> tuple[str, int]:
        return f"10.0.{MACHINES.index(machine) + 1}.1", port

    def cut(self, machine: str) -> None:
        """The cable is pulled out at the stores' end: nobody is told that anything is gone."""
        self._ip(STORES, "link", "set", "dev", f"to-{machine}", "down")

    def slow(self, machine: str, rate: int) -> None:
        burst = max(4000, rate // 50)
        if self._shaping == "netem":
            self._shape(machine, "netem", "rate", f"{8 * rate}bit", "delay", "20ms", "5ms")
        else:
            self._shape(machine, "tbf", "rate", f"{8 * rate}bit", "burst", str(burst), "latency", "100ms")

    def lossy(self, machine: str) -> None:
        """Packets are lost all the time, in both directions."""
        if self._shaping == "netem":
            self._shape(machine, "netem", "loss", "5%")
        else:  # a queue of so few packets loses some of every burst
            self._shape(machine, "tbf", "rate", "40mbit", "burst", "4000", "limit", "12000")

    def lost(self, machine: str) -> int:
        with self.inside(STORES):
            shown = _run("tc", "-statistics", "qdisc", "show", "dev", f"to-{machine}")
        return int(shown.partition("(dropped ")[2].partition(",")[0])

    def _ends(self, machine: str) -> tuple[tuple[str, str], ...]:
        """Both ends of a link: the place, and the device there."""
        return ((machine, "up0"), (STORES, f"to-{machine}"))

    def _shape(self, machine: str, *how: str) -> None:
        for place, device in self._ends(machine):
            with self.inside(place):
                _run("tc", "qdisc", "replace", "dev", device, "root", *how)

    def mend(self, machine: str) -> None:
        self._ip(STORES, "link", "set", "dev", f"to-{machine}", "up")
        for place, device in self._ends(machine):
            with self.inside(place):
                subprocess.run(["tc", "qdisc", "delete", "dev", device, "root"], capture_output=True)

    def close(self) -> None:
        for descriptor in self._places.values():
            os.close(descriptor)
        self._places.clear()


class Loopback:
    """See the module. Each pair of a machine and a server has a proxy between them."""

    def __init__(self) -> None:
        self._proxies: dict[tuple[str, int], Proxy] = {}

    @contextlib.contextmanager
    def inside(self, place: str) -> Iterator[None]:
        yield

    def path(self, place: str) -> str:
        return ""

    def address(self, machine: str, port: int) -> tuple[str, int]:
        if (machine, port) not in self._proxies:
            self._proxies[machine, port] = Proxy(("127.0.0.1", port))
        return "127.0.0.1", self._proxies[machine, port].port

    def _set(self, machine: str, mood: Mood) -> None:
        for (owner, _), proxy in self._proxies.items():
            if owner == machine:
                proxy.mood = mood

    def cut(self, machine: str) -> None:
        self._set(machine, Mood.SILENT)

    def slow(self, machine: str, rate: int) -> None:
        for proxy in self._proxies.values():
            proxy.rate = rate
        self._set(machine, Mood.SLOW)

    def lossy(self, machine: str) -> None:
        """A proxy loses connections, not packets: each after 50,000 bytes."""
        for proxy in self._proxies.values():
            proxy.cut_bytes = 50_000
        self._set(machine, Mood.CUT)

    def lost(self, machine: str) -> int:
        return 1

    def mend(self, machine: str) -> None:
        self._set(machine, Mood.PASS)

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.close()
