"""A payload that makes no progress while all agents are running and the client is there. run.py runs these tests."""
import os, threading

import agent as agents
from recovery import LIMIT, Application
from run import BIG, Base, Client, Raw, field, read
from stopped import StoppedApplication, alone
from tls import Tls, TlsClient
from wait import wait_for

PART = 100_000


class Stalled(Base):
    """The client gets a part of each payload, and then nothing."""

    def setUp(self):
        super().setUp()
        self.agent.on_handoff = self.some

    def some(self, s, h):
        c = self.agent.client_socket(h["handoff"])
        self.stalled = h, c
        self.agent.deliver(c, self.agent.payload(h["offer"])[:PART])

    def file(self, what):
        path = self.agent.shim_path + what
        self.addCleanup(lambda: os.path.exists(path) and os.unlink(path))
        return path

    def wants(self, what):
        """Creates a file that has the shim (kernel_shim.c) change how the client seems to behave, as long as the file
        exists. Returns its path."""
        open(self.file(what), "w").close()
        return self.file(what)

    def happens(self, what, times=1):
        """Waits until the shim has reported something by a file, and removes the file."""
        for _ in range(times):
            wait_for(lambda: os.path.exists(self.file(what)))
            os.unlink(self.file(what))

    def counts(self):
        n = self.agent.counters()
        return n["relayed_stalled"], n["relayed_stopped"], n["aborted"]

    def begun(self, uri="/big"):
        c = Client()
        c.send(uri)
        self.assertEqual(c.head()[0], 200)
        return c

    def rest_of(self, c):
        self.assertEqual(c.f.read(len(BIG)) == BIG, True)

    def test_the_rest_is_relayed(self):
        c = Client()
        r = c.get("/big")
        self.assertEqual(r.body == BIG, True)
        self.assertClean(r)
        self.assertEqual((self.counts(), self.agent.handoffs()), ((1, 0, 0), 0))
        self.agent.wait("abort")
        self.assertEqual(self.log()[3:6], ["shortcut", str(len(BIG)), str(len(BIG))])
        with open(self.dir + "/error.log") as f:
            self.assertRegex(f.read(), r"\[error\].* has stopped at byte 100000 of .*check that no firewall drops its ACKs")
        # The next body on that connection is relayed; other connections are not affected.
        self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual(self.outcome(n=2), "relayed:vain")
        self.agent.on_handoff = self.agent.serve
        self.assertEqual(Client().get("/big").body == BIG, True)
        self.assertEqual(self.outcome(n=3), "shortcut")

    def test_a_client_that_has_no_room_gets_nothing_for_a_good_reason(self):
        shut = self.wants(".shut")
        c = self.begun()
        self.happens(".looked", times=2)
        self.assertEqual((self.counts(), os.path.exists(self.file(".asked"))), ((0, 0, 0), False))
        os.unlink(shut)
        self.rest_of(c)
        self.assertEqual(self.counts(), (1, 0, 0))

    def test_a_client_that_does_not_answer_is_not_there(self):
        mute = self.wants(".mute")
        c = self.begun()
        self.happens(".asked", times=2)
        self.assertEqual(self.counts(), (0, 0, 0))
        os.unlink(mute)
        self.rest_of(c)
        self.assertEqual(self.counts(), (1, 0, 0))

    def test_a_backend_that_is_lost_meanwhile_is_more_than_a_stall(self):
        self.wants(".mute")
        c = self.begun()
        self.happens(".asked")
        h, _ = self.stalled
        self.agent.on_handoff = self.agent.serve
        for s in self.agent.ring_of:
            self.agent.end(s, h["handoff"], 7, peer=0)
        self.rest_of(c)
        n = self.agent.counters()
        self.assertEqual((self.counts(), n["failovers"]), ((0, 0, 0), 1))

    def test_many(self):
        self.whole_for_many("/big", BIG)


class Concurrent(Raw):
    """Answers each request in a thread of its own."""

    def serve(self, c, request):
        threading.Thread(target=super().serve, args=(c, request), daemon=True).start()


@alone
class StalledApplication(Application):
    rest = StoppedApplication.rest

    def stalls(self, *answers):
        self.application(*answers)
        self.agent.on_handoff = lambda s, h: Stalled.some(self, s, h)

    def hanging(self):
        """Returns a client and an event. The client has got the header, but no byte of the body. The request for the
        rest has been made, and gets no answer until the event is set."""
        answered, left = threading.Event(), [self.whole, lambda q: answered.wait(60) and b"", self.rest, self.whole]
        self.raw = Concurrent(lambda q: left.pop(0)(q))
        self.addCleanup(self.raw.close)
        self.addCleanup(answered.set)
        self.agent.on_handoff = lambda s, h: setattr(self, "begun", (s, h))
        c = Client()
        c.send("/raw/x")
        self.assertEqual(c.head()[0], 200)
        wait_for(lambda: len(self.raw.requests) >= 2)
        return c, answered

    def test_a_handoff_that_completes_meanwhile_does_not_wait_for_the_rest(self):
        c, _ = self.hanging()
        threading.Thread(target=self.agent.serve, args=self.begun, daemon=True).start()
        self.assertEqual(c.f.read(len(BIG)) == BIG, True)
        self.agent.on_handoff = self.agent.serve
        self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual(Stalled.counts(self), (0, 0, 0))
        self.assertNotIn("upstream timed out", read(self.dir + "/error.log"))

    def test_a_fetch_that_comes_meanwhile_does_not_end_with_the_rest(self):
        c, _ = self.hanging()
        s, h = self.begun
        self.agent.client_socket(h["handoff"]).close()
        self.agent.end(s, h["handoff"], LIMIT)
        self.assertEqual(c.f.read(len(BIG)) == BIG, True)
        self.agent.on_handoff = self.agent.serve
        self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual(Stalled.counts(self), (0, 0, 0))

    def test_a_fetch_that_fails_meanwhile_has_a_rest_of_its_own(self):
        c, answered = self.hanging()
        s, h = self.begun
        self.agent.on_fetch = lambda s, fetch, *rest: self.agent.end(s, fetch, LIMIT)
        self.agent.client_socket(h["handoff"]).close()
        self.agent.end(s, h["handoff"], LIMIT)
        self.assertEqual(c.f.read(len(BIG)) == BIG, True)
        answered.set()
        self.agent.on_handoff = self.agent.serve
        self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual(Stalled.counts(self), (0, 1, 0))

    def test_no_answer_for_the_rest_is_no_harm(self):
        bad = lambda q: b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
        self.stalls(self.whole, *[bad] * 9)
        c = Client()
        c.send("/raw/x")
        self.assertEqual(c.head()[0], 200)
        wait_for(lambda: len(self.raw.requests) >= 2)
        self.assertIsNone(field(self.raw.requests[1], "Shunt-Consent"))
        # The stall may have been due to a slow disk: now the backend continues, and the client gets the whole body from
        # it.
        h, client = self.stalled
        self.agent.deliver(client, self.agent.payload(h["offer"])[PART:])
        self.agent.ring.post(h["handoff"], len(BIG), agents.COMPLETE)
        client.close()
        self.assertEqual(c.f.read(len(BIG)) == BIG, True)
        self.assertEqual((Stalled.counts(self), self.agent.counters()["shortcuts"]), ((0, 0, 0), 1))

    def test_what_cannot_be_answered_is_asked_for_again(self):
        bad = lambda q: b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
        self.stalls(self.whole, bad, self.rest)
        self.assertEqual(Client().get("/raw/x").body == BIG, True)
        self.assertEqual(Stalled.counts(self), (1, 0, 0))


@alone
class StalledTls(Tls):
    def test_nobody_knows_which_records_were_sealed(self):
        self.agent.on_handoff = lambda s, h: None
        c = TlsClient()
        c.s.settimeout(7)
        with self.assertRaises(TimeoutError):
            c.get("/big")
        self.assertEqual(Stalled.counts(self), (0, 0, 0))
