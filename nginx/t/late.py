"""Fetches (bodies that come through both agents) that fail after the response's header was sent: the rest of the body
is relayed through all tiers, or a reset tells the client that the rest is missing. run.py runs these tests."""
import os, resource, socket, ssl, struct, threading

import agent as agents
from recovery import ETAG, LIMIT, PEER_LOST, Application
from run import BIG, TEXT, Base, Client, read
from endings import worker_of
from stopped import NOT_ALLOWED, Refused, StoppedApplication, alone
from tls import Tls, TlsClient
from wait import wait_for

UNKNOWN_OFFER, EXPIRED = 1, 2


class Late(Base):
    """Fetches without steering programs (BPF): SHUNT_BEGIN fails with ENOPROTOOPT, and each offered body is fetched
    after its header has left."""
    shim = False

    def refuse(self, reason):
        self.agent.on_fetch = lambda s, id, offer, length: self.agent.end(s, id, reason)

    def cut(self, part):
        self.agent.on_fetch = lambda *a: self.agent.serve_fetch(*a, part=part)

    def is_whole(self, uri="/big", body=BIG, fields=""):
        c = Client(timeout=30)
        r = c.get(uri, fields=fields)
        self.assertEqual(r.body == body, True)
        self.assertClean(r)
        self.assertEqual(self.log()[3:6], ["fetched:begin", str(len(body)), str(len(body))])
        n = self.agent.counters()
        self.assertEqual((n["fetch_failed"], n["relayed_stopped"], n["aborted"]), (1, 1, 0))
        self.assertEqual(c.get("/small").body, b"s" * 100)  # the connection is still usable

    def test_an_agent_that_cannot(self):
        self.refuse(LIMIT)
        self.is_whole()

    def test_whatever_it_says(self):
        for reason in UNKNOWN_OFFER, EXPIRED, PEER_LOST, NOT_ALLOWED:
            self.refuse(reason)
            self.assertEqual(Client().get("/big").body == BIG, True, reason)
        self.assertEqual(self.agent.counters()["relayed_stopped"], 4)

    def test_one_that_is_cut_short(self):
        self.cut(0.5)
        self.is_whole()

    def test_one_that_brings_nothing(self):
        self.cut(0)
        self.is_whole()

    def test_a_part_that_the_client_asked_for(self):
        self.cut(0.3)
        self.is_whole(body=BIG[1000:2_001_000], fields="Range: bytes=1000-2000999\r\n")

    def test_through_an_intermediate(self):
        self.cut(0.3)
        self.is_whole("/via/big")

    def test_unbuffered(self):
        self.cut(0.3)
        self.is_whole("/unbuffered/big")

    def test_another_length(self):
        self.agent.on_fetch = lambda s, fetch, offer, length: self.agent.serve_fetch(s, fetch, offer, length + 1)
        self.is_whole()

    def test_a_client_that_reads_slowly(self):
        self.cut(0.5)
        c = Client(timeout=30, rcvbuf=8192)
        c.send("/big")
        c.head()
        got = b""
        while len(got) < len(BIG):
            part = c.f.read(min(65536, len(BIG) - len(got)))
            self.assertNotEqual(part, b"", len(got))
            got += part
        self.assertEqual(got == BIG, True)

    def test_an_agent_that_is_killed(self):
        for part in 0, 0.5:
            with self.subTest(part):
                def killed(s, fetch, offer, length):
                    if part:
                        self.agent.serve_fetch(s, fetch, offer, length, part=part)
                    self.agent.vanish()

                self.agent.on_fetch = killed
                self.assertEqual(Client(timeout=30).get("/big").body == BIG, True)
                self.agent.close()
                self.agent = agents.Agent(self.dir)
                wait_for(lambda: self.agent.workers >= 2)

    def test_an_agent_that_is_stopped(self):
        """The agent stops before it answers, or in the middle of its answer."""
        for bytes in None, 100_000:
            with self.subTest(bytes):
                held = []

                def stopped(s, fetch, offer, length):
                    if bytes:
                        ours, theirs = socket.socketpair()
                        socket.send_fds(s, [struct.pack("=IIQQ", agents.FETCHED, 24, fetch, length)], [theirs.fileno()])
                        theirs.close()
                        ours.sendall(BIG[:bytes])
                        held.append(ours)
                    self.agent.stop()

                self.agent.on_fetch = stopped
                self.assertEqual(Client(timeout=30).get("/big").body == BIG, True)
                self.agent.beats.set()

    def test_many(self):
        self.cut(0.4)
        self.whole_for_many("/big", BIG)

    def is_reset(self, uri, client=Client):
        c = client()
        c.s.settimeout(30)
        c.send(uri)
        c.head()
        with self.assertRaises((ConnectionResetError, ssl.SSLError)):
            while c.f.read(65536):
                pass
        self.assertEqual(self.agent.counters()["relayed_stopped"], 0)

    def test_an_etag_is_enough_for_the_whole_of_it_and_not_for_a_rest_of_a_file(self):
        self.cut(0)
        self.is_whole("/digest/big")

    def test_nor_for_a_rest_where_files_must_be_the_same(self):
        self.cut(0.5)
        self.is_reset("/digest/big")

    def test_where_nobody_is_to_go_on_it_is_reset(self):
        self.cut(0.5)
        self.is_reset("/nobody/big")

    def test_and_before_the_first_byte(self):
        self.refuse(LIMIT)
        self.is_reset("/nobody/big")


class LateDescriptors(Base):
    shim, is_whole = False, Late.is_whole
    meant = "Too many open files"  # the worker is also the backend, and logs this as the backend

    def test_a_worker_without_a_descriptor_for_it(self):
        """The worker may open no more descriptors, so the kernel drops the one that comes with FETCHED. A moment later
        the worker may open descriptors again."""
        worker = worker_of(self.nginx)
        before = resource.prlimit(worker, resource.RLIMIT_NOFILE)

        def full(s, fetch, offer, length):
            used = max(map(int, os.listdir(f"/proc/{worker}/fd"))) + 1
            free = used - len(os.listdir(f"/proc/{worker}/fd"))
            resource.prlimit(worker, resource.RLIMIT_NOFILE, (used - free, before[1]))
            self.agent.serve_fetch(s, fetch, offer, length)
            wait_for(lambda: self.agent.counters()["fetch_failed"])
            resource.prlimit(worker, resource.RLIMIT_NOFILE, before)

        self.agent.on_fetch = full
        self.is_whole()
        self.assertIn("this worker has no descriptor left", read(self.dir + "/error.log"))
        self.assertNotIn("lost the agent", read(self.dir + "/error.log"))


@alone
class LateApplication(StoppedApplication):
    """The fetch fails after the header has left, and the request for the rest goes to an application, whose answers a
    test chooses."""
    shim = False
    is_reset = Late.is_reset

    def answered(self, *answers):
        self.agent.on_fetch = lambda *a: self.agent.serve_fetch(*a, part=0.5)
        self.application(*answers)

    def error(self, q):
        return b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"

    def test_errors_are_asked_again(self):
        self.answered(self.whole, self.error, lambda q: b"", self.rest)
        self.assertEqual(Client(timeout=30).get("/raw/x").body == BIG, True)

    def test_a_rest_that_ends_early_is_gone_on_with(self):
        self.answered(self.whole, lambda q: self.rest(q)[:200_000], lambda q: self.rest(q)[:200_000], self.rest)
        self.assertEqual(Client(timeout=30).get("/raw/x").body == BIG, True)
        self.assertEqual(self.agent.counters()["relayed_stopped"], 1)

    def test_errors_without_end_are_a_reset(self):
        self.answered(self.whole, *[self.error] * 9)
        self.is_reset("/raw/x")
        self.assertEqual(len(self.raw.requests), 1 + 5)

    def test_without_a_strong_etag_it_is_a_reset(self):
        for fields in "Accept-Ranges: bytes\r\n", f"ETag: W/{ETAG}\r\nAccept-Ranges: bytes\r\n":
            with self.subTest(fields):
                self.answered(lambda q: self.whole(q, fields=fields))
                self.is_reset("/raw/x")
                self.assertEqual(len(self.raw.requests), 1)
                self.doCleanups()

    def test_the_rest_of_something_else_is_a_reset(self):
        self.answered(self.whole, lambda q: self.rest(q).replace(ETAG.encode(), b'"another"'))
        self.is_reset("/raw/x")
        self.assertEqual(len(self.raw.requests), 2)


class LateRefused(Base):
    """The backend's agent refuses the handoff, and then the fetch."""

    def test_the_body_is_relayed(self):
        Refused.refuse(self, NOT_ALLOWED)
        Late.refuse(self, LIMIT)
        c = Client(timeout=30)
        for n in 1, 2, 3:
            self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual(self.log(n=1)[3:6], ["fetched:refused", str(len(BIG)), str(len(BIG))])
        wait_for(lambda: self.agent.handoffs() == 0)


@alone
class LateRefusedTls(Tls):
    def test_the_body_is_relayed(self):
        Refused.refuse(self, NOT_ALLOWED)
        Late.refuse(self, LIMIT)
        c = TlsClient()
        c.s.settimeout(30)
        for n in 1, 2, 3:
            self.assertEqual(c.get("/big").body == BIG, True)
        self.assertGreater(self.agent.counters()["relayed_stopped"], 0)
        self.assertEqual(c.get("/text.html").body, TEXT)
