"""A payload that comes no further while all agents are at work and the client is there. run.py runs these tests."""
import os, time

import agent as agents
from recovery import Application
from run import BIG, Base, Client, field
from stopped import StoppedApplication, alone
from tls import Tls, TlsClient

PART = 100_000


class Stalled(Base):
    """Of each handoff the client gets a part, and then nothing."""

    def setUp(self):
        super().setUp()
        self.agent.on_handoff = self.some

    def some(self, s, h):
        self.stalled = h, self.agent.client_socket(h["handoff"])
        self.agent.write(self.stalled[1], self.agent.payload(h["offer"])[:PART])
        agents.wait_acked(self.stalled[1].fileno())

    def wants(self, what):
        """Something of the client's, which the shim stands in for; undone by removing the file that this returns."""
        path = self.agent.shim_path + what
        open(path, "w").close()
        self.addCleanup(lambda: os.path.exists(path) and os.unlink(path))
        return path

    def counts(self):
        n = self.agent.counters()
        return n["relayed_stalled"], n["relayed_stopped"], n["aborted"]

    def begun(self, uri="/big"):
        c = Client(timeout=30)
        c.send(uri)
        self.assertEqual(c.head()[0], 200)
        return c

    def rest_of(self, c):
        self.assertEqual(c.f.read(len(BIG)) == BIG, True)

    def test_the_rest_is_relayed(self):
        c = Client(timeout=30)
        r = c.get("/big")
        self.assertEqual(r.body == BIG, True)
        self.assertClean(r)
        self.assertEqual((self.counts(), self.agent.handoffs()), ((1, 0, 0), 0))
        self.agent.wait("abort")
        self.assertEqual(self.log()[3:6], ["shortcut", str(len(BIG)), str(len(BIG))])
        with open(self.dir + "/error.log") as f:
            self.assertRegex(f.read(), r"\[error\].* comes no further than byte 100000 of .*does a firewall drop its ACKs")
        # What is next on that connection goes another way, and other connections are not concerned.
        self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual(self.outcome(n=2), "relayed:vain")
        self.agent.on_handoff = self.agent.serve
        self.assertEqual(Client().get("/big").body == BIG, True)
        self.assertEqual(self.outcome(n=3), "shortcut")

    def test_a_client_that_has_no_room_gets_nothing_for_a_good_reason(self):
        shut = self.wants(".shut")
        c = self.begun()
        time.sleep(6) # in which one that has room would have the rest
        self.assertEqual(self.counts(), (0, 0, 0))
        os.unlink(shut)
        self.rest_of(c)
        self.assertEqual(self.counts(), (1, 0, 0))

    def test_a_client_that_does_not_answer_is_not_there(self):
        mute = self.wants(".mute")
        c = self.begun()
        time.sleep(7)
        self.assertEqual(self.counts(), (0, 0, 0))
        os.unlink(mute)
        self.rest_of(c)
        self.assertEqual(self.counts(), (1, 0, 0))

    def test_a_backend_that_is_lost_meanwhile_is_more_than_a_stall(self):
        self.wants(".mute")
        c = self.begun()
        time.sleep(4) # the client is being asked
        h, _ = self.stalled
        self.agent.on_handoff = self.agent.serve
        for s in self.agent.ring_of:
            self.agent.end(s, h["handoff"], 7, peer=0)
        self.rest_of(c)
        n = self.agent.counters()
        self.assertEqual((self.counts(), n["failovers"]), ((0, 0, 0), 1))

    def test_many(self):
        self.whole_for_many("/big", BIG)


@alone
class StalledApplication(Application):
    rest = StoppedApplication.rest

    def stalls(self, *answers):
        self.application(*answers)
        self.agent.on_handoff = lambda s, h: Stalled.some(self, s, h)

    def test_no_answer_for_the_rest_is_no_harm(self):
        bad = lambda q: b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
        self.stalls(self.whole, *[bad] * 9)
        c = Client(timeout=30)
        c.send("/raw/x")
        self.assertEqual(c.head()[0], 200)
        self.until(lambda: len(self.raw.requests) >= 2)
        self.assertIsNone(field(self.raw.requests[1], "Shunt-Consent"))
        # It was the disk, say: the backend goes on, and the client has all from there.
        h, s = self.stalled
        self.agent.write(s, self.agent.payload(h["offer"])[PART:])
        agents.wait_acked(s.fileno())
        self.agent.ring.post(h["handoff"], len(BIG), agents.COMPLETE)
        s.close()
        self.assertEqual(c.f.read(len(BIG)) == BIG, True)
        self.assertEqual((Stalled.counts(self), self.agent.counters()["shortcuts"]), ((0, 0, 0), 1))

    def test_what_cannot_be_answered_is_asked_for_again(self):
        bad = lambda q: b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
        self.stalls(self.whole, bad, self.rest)
        self.assertEqual(Client(timeout=40).get("/raw/x").body == BIG, True)
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
