"""Clusters for tests: the fixtures `redis_cluster` and `valkey_cluster`, and `run_cluster` for one of your own.

They are made of local binaries (see `l2kit.testing.servers`); without one the test is skipped, or fails when
``L2KIT_REQUIRE`` names the flavor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import pytest

from l2kit.testing.servers import (
    TEST_PASSWORD,
    Flavor,
    LocalServer,
    Reply,
    RespServer,
    ServerError,
    free_port,
    run_local,
)
from l2kit.testing.waiting import wait_until

SLOTS: Final = 1 << 14

_FORMING_S: Final = 60.0
_MAX_REDIRECTIONS: Final = 8


class RespCluster:
    """A running cluster of primaries with a replica each.

    Attributes:
        nodes: all servers; the first half began as primaries, the others as their replicas in the same order.
    """

    def __init__(self, nodes: Sequence[LocalServer]) -> None:
        """Describe nodes that run, and that :meth:`form` is to make a cluster of."""
        self.nodes: Final = list(nodes)

    @property
    def password(self) -> str:
        """The password of every node."""
        return TEST_PASSWORD

    def form(self) -> None:
        """Introduce the nodes to each other, share out the slots, and wait until all of them agree."""
        half = len(self.nodes) // 2
        share = -(-SLOTS // half)
        for epoch, node in enumerate(self.nodes, start=1):
            node.command("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for index, node in enumerate(self.nodes[:half]):
            node.command("CLUSTER", "ADDSLOTSRANGE", index * share, min(SLOTS, (index + 1) * share) - 1)
        self.meet(*self.nodes[1:])
        for primary, replica in zip(self.nodes[:half], self.nodes[half:], strict=True):
            replica.command("CLUSTER", "REPLICATE", self.id_of(primary))
        self.wait_until_well()
        for number in range(20 * half):  # a replica that never had any data is not announced
            self.command("SET", f"l2kit-forming-{number}", "x")
            self.command("DEL", f"l2kit-forming-{number}")

        def announced() -> bool:
            return all(len(shard) > 3 for node in self.nodes for shard in _list(node.command("CLUSTER", "SLOTS")))

        wait_until(announced, "the replicas being announced", _FORMING_S)

    def meet(self, *nodes: LocalServer) -> None:
        """Introduce nodes to the first one, and wait until all know all."""
        first = self.nodes[0]
        mine = next(words for words in self.lines_of(first) if "myself" in words[2])
        bus_port = mine[1].partition("@")[2].partition(",")[0]
        for node in nodes:
            node.command("CLUSTER", "MEET", first.host, first.port, bus_port)
            if node not in self.nodes:
                self.nodes.append(node)
        names = {self.id_of(node) for node in self.running}

        def acquainted() -> bool:
            return all(names <= {words[0] for words in self.lines_of(node)} for node in self.running)

        wait_until(acquainted, "the nodes knowing each other", _FORMING_S)

    def wait_until_well(self) -> None:
        """Wait until every node that runs says that the cluster is, and every replica has its data."""

        def well(node: RespServer) -> bool:
            try:
                if node.info("cluster info").get("cluster_state") != "ok":
                    return False
                replication = node.info("replication")
            except (OSError, ServerError):
                return False
            return replication["role"] == "master" or replication["master_link_status"] == "up"

        wait_until(lambda: all(map(well, self.running)), "the cluster being well", _FORMING_S)
        wait_until(self._agree, "the nodes agreeing who is whose replica", _FORMING_S)

    def _agree(self) -> bool:
        views = set()
        for node in self.running:
            views.add(frozenset((words[0], "slave" in words[2], words[3]) for words in self.lines_of(node)))
        return len(views) == 1

    @property
    def running(self) -> list[LocalServer]:
        """The nodes that were not stopped or killed."""
        return [node for node in self.nodes if node.runs]

    def primaries(self) -> list[LocalServer]:
        """The running nodes that call themselves primaries and have slots, by their first slot."""
        first_slots: dict[int, LocalServer] = {}
        for node in self.running:
            mine = next(words for words in self.lines_of(node) if "myself" in words[2])
            slots = [word for word in mine[8:] if not word.startswith("[")]
            if "master" in mine[2] and slots:
                first_slots[int(slots[0].partition("-")[0])] = node
        return [node for _, node in sorted(first_slots.items())]

    def replica_of(self, primary: RespServer) -> LocalServer:
        """A running replica of ``primary``."""
        wanted = self.id_of(primary)
        for node in self.running:
            mine = next(words for words in self.lines_of(node) if "myself" in words[2])
            if mine[3] == wanted:
                return node
        raise AssertionError(f"{primary!r} has no replica that runs")

    def owner_of(self, key: str | bytes) -> LocalServer:
        """The primary that has ``key``."""
        slot = self.slot_of(key)
        for node in self.primaries():
            for start, stop in self.slots_of(node):
                if start <= slot <= stop:
                    return node
        raise AssertionError(f"nobody serves slot {slot}")

    def slot_of(self, key: str | bytes) -> int:
        """The slot of ``key``, as a server says."""
        slot = self.running[0].command("CLUSTER", "KEYSLOT", key)
        assert isinstance(slot, int)
        return slot

    def id_of(self, node: RespServer) -> str:
        """Its name in the cluster."""
        name = node.command("CLUSTER", "MYID")
        assert isinstance(name, bytes)
        return name.decode()

    def lines_of(self, node: RespServer) -> list[list[str]]:
        """CLUSTER NODES as ``node`` sees them, in words."""
        reply = node.command("CLUSTER", "NODES")
        assert isinstance(reply, bytes)
        return [line.split() for line in reply.decode().splitlines()]

    def command(self, *words: str | bytes | int) -> Reply:
        """Run a command about one key, its second word, where that key is: for checks around an adapter."""
        node: RespServer = self.running[0]
        asking = False
        for _ in range(_MAX_REDIRECTIONS):
            try:
                return node.command(*words, before=("ASKING",) if asking else ())
            except ServerError as error:
                kind, _, where = str(error).partition(" ")
                if kind not in ("MOVED", "ASK"):
                    raise
                port = int(where.rpartition(":")[2])
                node = next(each for each in self.nodes if each.port == port)
                asking = kind == "ASK"
        raise AssertionError(f"{words[0]!r} was sent round and round")

    def delete_all(self, prefix: str) -> None:
        """Remove every key under ``prefix``."""
        for node in self.primaries():
            node.delete_all(prefix)

    def url(self, scheme: str | None = None) -> str:
        """The URL of one node of the cluster, with credentials."""
        node = self.running[0]
        return node.url(scheme or f"{node.flavor}+cluster")

    def move_slot(self, slot: int, source: RespServer, target: RespServer) -> Iterator[str]:
        """Move a slot with its keys, step by step: yields before each key and before each change of owners."""
        source_id, target_id = self.id_of(source), self.id_of(target)
        yield "importing"
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        yield "migrating"
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        while keys := source.command("CLUSTER", "GETKEYSINSLOT", slot, 1):
            assert isinstance(keys, list)
            yield "key"
            for key in keys:
                assert isinstance(key, bytes)
                auth: tuple[str, ...] = ("AUTH", self.password)
                source.command("MIGRATE", target.host, target.port, key, 0, 10_000, *auth)
        yield "owner"
        for node in (target, source, *(node for node in self.primaries() if node not in (source, target))):
            node.command("CLUSTER", "SETSLOT", slot, "NODE", target_id)

    def slots_of(self, node: RespServer) -> list[tuple[int, int]]:
        """The ranges of slots that ``node`` says it serves, ends included."""
        mine = next(words for words in self.lines_of(node) if "myself" in words[2])
        ranges = [word.partition("-") for word in mine[8:] if not word.startswith("[")]
        return [(int(start), int(stop or start)) for start, _, stop in ranges]


def _list(reply: Reply) -> list[list[Reply]]:
    assert isinstance(reply, list)
    return [entry for entry in reply if isinstance(entry, list)]


@contextmanager
def run_cluster(
    flavor: Flavor, primaries: int = 3, *, node_timeout_ms: int = 15_000, **options: str
) -> Iterator[RespCluster]:
    """Run a cluster of one's own with a replica for each primary.

    Args:
        flavor: which servers.
        primaries: how many.
        node_timeout_ms: after so long without a word a node counts as dead; low for tests that kill some.
        options: see `run_server`.
    """
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(run_node(flavor, node_timeout_ms=node_timeout_ms, **options))
            for _ in range(2 * primaries)
        ]
        cluster = RespCluster(nodes)
        cluster.form()
        yield cluster


@contextmanager
def run_node(flavor: Flavor, *, node_timeout_ms: int = 15_000, **options: str) -> Iterator[LocalServer]:
    """Run a server that can be part of a cluster and is not yet."""
    cluster_options = {
        "cluster-enabled": "yes",
        "cluster-port": str(free_port()),
        "cluster-node-timeout": str(node_timeout_ms),
        "cluster-replica-validity-factor": "0",
        "masterauth": TEST_PASSWORD,
        "repl-diskless-sync-delay": "0",
        "repl-backlog-size": "16kb",
    }
    cluster_options |= {name.replace("_", "-"): value for name, value in options.items()}
    with run_local(flavor, cluster_options) as node:
        yield node


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RespCluster]:
    """One Redis cluster for the whole session. Use keys of your own, and `run_cluster` to break one."""
    with run_cluster("redis") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def valkey_cluster() -> Iterator[RespCluster]:
    """One Valkey cluster for the whole session. Use keys of your own, and `run_cluster` to break one."""
    with run_cluster("valkey") as cluster:
        yield cluster
