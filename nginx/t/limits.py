"""Limits that the agent sets in the board (memory that it shares with nginx), the number of handoffs under way, which
the agent reads in shared memory, and trace ids. A handoff lets a backend send a body on the client's connection. run.py
runs these tests."""
import os, struct

import agent as agents
from consents import CONSENT
from run import BIG, Base, Client, read
from wait import wait_for

ID, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Limits(Base):
    def close(self, offset, bits):
        os.pwrite(self.agent.board, struct.pack("=I", bits), offset)

    def test_closed_to_handoffs_nobody_consents(self):
        self.close(agents.HEAD_CLOSED, agents.CLOSED_HANDOFFS)
        c = Client()
        self.assertEqual(c.get("/big").body, BIG)
        self.assertEqual((self.outcome(), self.outcome(8083)), ("relayed:handoffs_limit", "relayed:no_consent"))
        self.close(agents.HEAD_CLOSED, 0)
        self.assertEqual(c.get("/big").body, BIG)
        self.assertEqual(self.outcome(n=2), "shortcut")
        self.assertEqual(self.agent.counters()["relayed_handoffs_limit"], 1)

    def test_closed_to_offers_they_are_relayed(self):
        c = Client()
        for n, offset in enumerate((agents.HEAD_CLOSED, agents.HEAD_BYTES + agents.PEER_CLOSED)):
            self.close(offset, agents.CLOSED_OFFERS)
            self.assertEqual(c.get("/big").body, BIG)
            self.assertEqual(self.outcome(8083, 2 * n + 1), "relayed:offers_limit")
            self.close(offset, 0)
            self.assertEqual(c.get("/big").body, BIG)
            self.assertEqual(self.outcome(n=2 * n + 2), "shortcut")
        self.assertEqual(self.agent.counters()["relayed_offers_limit"], 2)

    def test_handoffs_that_are_not_over_are_told(self):
        self.agent.on_handoff = lambda s, h: None
        clients = [Client() for _ in range(3)]
        for c in clients:
            c.send("/big")
        handoffs = [self.agent.wait("handoff") for _ in clients]
        self.assertEqual(self.agent.handoffs(), 3)
        clients[0].s.close(), clients[0].f.close()
        self.agent.wait("abort")
        wait_for(lambda: self.agent.handoffs() == 2)
        self.agent.on_handoff = self.agent.serve
        self.assertEqual(Client().get("/big").body, BIG)
        wait_for(lambda: self.agent.handoffs() == 2)
        # The two handoffs that are not over are counted for the next agent, too.
        self.agent.close()
        old, self.agent = self.agent, agents.Agent(self.dir)
        wait_for(lambda: self.agent.workers >= 2)
        wait_for(lambda: self.agent.handoffs() == 2)
        for c in clients[1:]:
            c.s.close(), c.f.close()
        wait_for(lambda: self.agent.handoffs() == 0)
        self.assertEqual(old.handoffs(), 0)


class Traces(Base):
    def test_the_id_goes_to_the_agent_and_into_the_log(self):
        offered = []
        self.agent.on_offer = lambda number, trace: offered.append(trace)
        c = Client()
        self.assertEqual(c.get("/big", fields=f"traceparent: 00-{ID}-{PARENT}-01\r\n").body, BIG)
        self.assertEqual((offered, self.agent.wait("handoff")["trace"].hex()), ([ID], ID))
        wait_for(lambda: f"handoff complete, {len(BIG)} payload bytes" in read(self.dir + "/error.log"))
        # Reason 14 says that the client is gone, so no backend continues.
        self.agent.on_handoff = lambda s, h: self.agent.end(s, h["handoff"], 14)
        with self.assertRaises(ConnectionResetError):
            c.get("/big", fields=f"traceparent: 00-{ID}-{PARENT}-01\r\n")
        lines = [l for l in read(self.dir + "/error.log").splitlines() if f", trace={ID}" in l]
        for said in "handoff complete", "handoff ended":
            self.assertEqual(len([l for l in lines if said in l]), 1, lines)

    def test_only_what_w3c_allows_is_one(self):
        cases = [("", None), (f"00-{ID}-{PARENT}-01", ID), (f"00-{ID}-{PARENT}-00", ID),
                 (f"cc-{ID}-{PARENT}-01-what-comes-later", ID), (f"cc-{ID}-{PARENT}-01", ID),
                 (f"00-{ID}-{PARENT}-01-more", None), (f"cc-{ID}-{PARENT}-01.more", None), (f"ff-{ID}-{PARENT}-01", None),
                 (f"00-{ID.upper()}-{PARENT}-01", None), (f"00-{'0' * 32}-{PARENT}-01", None),
                 (f"00-{ID}-{'0' * 16}-01", None), (f"00-{ID[1:]}-{PARENT}-01", None), (f"00-{ID}-{PARENT}", None),
                 (f"00-{ID}-{PARENT}-0", None), (f"00-{ID}-{PARENT}-0g", None), (f"00-{ID[:31]}\x80-{PARENT}-01", None),
                 (f"00-{ID}-{PARENT}-01\r\ntraceparent: 00-{ID}-{PARENT}-01", None)]
        for value, expected in cases:
            c = Client()
            fields = f"traceparent: {value}\r\n".encode("latin1") if value else b""
            c.s.sendall(b"GET /big HTTP/1.1\r\nHost: t\r\n" + fields + b"\r\n")
            self.assertEqual(c.receive().body, BIG)
            trace = self.agent.wait("handoff")["trace"]
            self.assertEqual(trace.hex() if any(trace) else None, expected, value)
