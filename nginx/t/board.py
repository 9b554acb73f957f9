"""What a worker of nginx reads on the board, also while an entry of it changes. The board is memory in which the agent
lists its peers (other machines' agents). run.py runs these tests."""
import os, re, struct, threading, time

import agent as agents
from run import BIG, Base, Client, read


class Newer(Base):
    """An agent of the next release. Its board has more fields than this module knows, besides all those that it
    knows."""
    agent_options = {"versions": (agents.VERSION, agents.VERSION + 1), "wider": 16}

    def test_what_this_module_knows_of_is_found(self):
        self.agent.add_peer(b"other", ["127.0.0.0/8"])
        for n in 1, 2:
            self.assertEqual(Client().get("/big").body == BIG, True)
            self.assertEqual(self.outcome(n=n), "shortcut")


class Older(Base):
    """An agent of an earlier release: its welcome (the first message to nginx) lacks the fields that this module can do
    without."""
    agent_options = {"welcome_bytes": 16}

    def test_what_it_leaves_out_is_not_missed(self):
        self.assertEqual(Client().get("/big").body == BIG, True)
        self.assertEqual(self.outcome(), "shortcut")


class Strange(Base):
    """An agent of a release that is too new, or with an invalid welcome or board: all bodies are relayed, and the log
    says why."""
    def relayed(self, why):
        self.assertEqual(Client().get("/big").body == BIG, True)
        self.assertEqual(self.outcome(), "relayed:no_agent")
        self.assertIn(why, read(self.dir + "/error.log"))


class TooShort(Strange):
    """A welcome that ends before the end of the number of the worker's ring (BPF ring buffer)."""
    agent_options = {"welcome_bytes": 15}

    def test_it_is_said(self):
        self.relayed("no agent at")


class TooNew(Strange):
    agent_options = {"versions": (agents.VERSION + 1, agents.VERSION + 2)}

    def test_it_is_said(self):
        self.relayed(f"the agent speaks versions {agents.VERSION + 1} to {agents.VERSION + 2}, this module")


class TooLarge(Strange):
    """A board that ends before its entries do."""
    agent_options = {"wider": 16}

    def setUp(self):
        at, agents.Agent.peer_at = agents.Agent.peer_at, lambda agent, index: 1 << 20
        self.addCleanup(setattr, agents.Agent, "peer_at", at)
        super().setUp()

    def test_it_is_said(self):
        self.relayed("the agent's board cannot be read")


class SpeaksFor(Base):
    def lines(self):
        return [l for l in read(self.dir + "/error.log").splitlines() if "speaks_for" in l]

    def test_where_nobody_speaks_for_us_all_is_relayed_and_it_is_said_once(self):
        self.agent.set_prefixes(["192.0.2.0/24", "::/0"])
        c = Client()
        for n in 1, 2:
            self.assertEqual(c.get("/big").body == BIG, True)
            self.assertEqual((self.outcome(n=n), self.outcome(8083, n)), ("relayed:speaks_for", "relayed:no_consent"))
        self.assertEqual(len(self.lines()), 1, self.lines())
        self.assertRegex(self.lines()[0], r"\[error\].* 127\.0\.0\.4:8081 .*\"self\"")
        self.assertEqual(self.agent.counters()["relayed_speaks_for"], 2)
        self.agent.set_prefixes(["127.0.0.4/31"], port=8081)
        self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual(self.outcome(n=3), "shortcut")
        self.agent.set_prefixes(["127.0.0.4"], port=8082)
        self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual(self.outcome(n=4), "relayed:speaks_for")

    def test_two_addresses_in_turns_are_said_once_each(self):
        self.agent.set_prefixes(["192.0.2.1"])
        for port in [8081, 8086] * 5:
            self.assertEqual(Client(port=port).get("/big").body == BIG, True)
        self.assertEqual(len(self.lines()), 2, self.lines())

    def test_an_offer_of_a_backend_that_does_not_is_fetched(self):
        self.agent.set_prefixes(["192.0.2.1"])
        self.agent.add_peer(b"other", ["127.0.0.0/8"])
        for n in 1, 2:
            self.assertEqual(Client().get("/big").body == BIG, True)
            self.assertEqual(self.outcome(n=n), "fetched:speaks_for")
        self.assertEqual(len(self.lines()), 1, self.lines())
        self.assertRegex(self.lines()[0], r"\[error\].* \"speaks_for\" of \[\[peer\]\] \"self\"")
        self.assertEqual(self.agent.counters()["fetched_speaks_for"], 2)


class Torn(Base):
    def test_an_entry_that_changes_is_waited_for(self):
        """The session with a peer begins and ends again and again while offers of this peer are checked. If the entry
        is just changing, a worker waits for some milliseconds. It relays a response only if the change takes longer,
        because the writing thread has lost its core."""
        epoch, stop, late = [2], threading.Event(), []

        def write(at, *words):
            os.pwrite(self.agent.board, struct.pack(f"={len(words)}I", *words), agents.HEAD_BYTES + at)

        def change():
            while not stop.is_set():
                epoch[0] += 2
                begun = time.monotonic()
                write(0, epoch[0] - 1, agents.PEER_DOWN)
                time.sleep(0.001)
                write(4, agents.PEER_UP)
                write(0, epoch[0])
                if time.monotonic() - begun > 0.003:
                    late.append(epoch[0])
                time.sleep(0.0005)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            c = Client()
            for _ in range(300):
                r = c.get("/text.html")
                self.assertEqual(r.status, 200)
        finally:
            stop.set()
            thread.join()
        n = self.agent.counters()
        relayed = n["relayed_no_peer"]
        self.assertEqual((n["refused_unknown_peer"], relayed + n["shortcuts"]), (0, 300))
        self.assertGreater(n["shortcuts"], 200, f"{relayed} relayed, {len(late)} changes that took long")
        self.assertTrue(relayed == 0 or late, f"{relayed} relayed, and no change took long")
