"""An agent that is stopped or gone, and a backend that refuses: every response is whole nevertheless, or ends in a
reset. A handoff lets a backend send a body on the client's connection. A consent is the request's header field by which
a frontend permits that. run.py runs these tests."""
import os, socket, ssl, threading, time

import agent as agents
from recovery import ETAG, PEER_LOST, Application, unavailable
from run import BIG, Base, Client, field, read
from tls import Tls, TlsClient
from wait import wait_for

LIMIT, BUSY, NOT_ALLOWED, UNREACHABLE = 9, 13, 15, 16


def alone(cls):
    """Class decorator: removes inherited tests from a class that inherits from another test class only to use its
    methods."""
    for name in dir(cls):
        if name.startswith("test") and name not in vars(cls):
            setattr(cls, name, None)
    return cls


class Stopped(Base):
    """The agent is stopped: its beat, a number in memory that it shares with nginx, does not change any more. Handoffs
    are unread or half done."""

    def part(self, bytes):
        """Has each handoff stop after this many bytes, together with the agent."""
        def some(s, h):
            c = self.agent.client_socket(h["handoff"])
            self.agent.deliver(c, self.agent.payload(h["offer"])[:bytes])
            c.close()
            self.agent.stop()

        self.agent.on_handoff = some

    def goes_on(self, uri="/big", body=BIG, fields=""):
        c = Client(timeout=30)
        r = c.get(uri, fields=fields)
        self.assertEqual(r.body == body, True)
        self.assertClean(r)
        n = self.agent.counters()
        self.assertEqual((n["relayed_stopped"], n["aborted"], n["failovers"]), (1, 0, 0))
        self.assertEqual(self.log()[3:6], ["shortcut", str(len(body)), str(len(body))])
        return c

    def test_nothing_was_sent(self):
        self.part(0)
        c = self.goes_on()
        # The connection is still usable, but there are no shortcuts until the agent is back.
        self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual(self.outcome(n=2), "relayed:no_agent")
        self.agent.on_handoff = self.agent.serve
        self.agent.beats.set()
        def shortcut(n=[2]):
            n[0] += 1
            self.assertEqual(c.get("/big").body == BIG, True)
            return self.outcome(n=n[0]) == "shortcut"
        wait_for(shortcut)

    def test_a_part_was_sent(self):
        self.part(1_000_001)
        self.goes_on()

    def test_a_part_of_a_part_was_sent(self):
        self.part(70_000)
        self.goes_on(body=BIG[1000:2_001_000], fields="Range: bytes=1000-2000999\r\n")

    def test_through_an_intermediate_and_unbuffered(self):
        self.part(100_000)
        self.goes_on("/via/big")

    def test_unbuffered(self):
        self.part(100_000)
        self.goes_on("/unbuffered/big")

    def test_a_client_that_reads_slowly(self):
        self.part(100_000)
        c = Client(timeout=30, rcvbuf=8192)
        c.send("/big")
        status, fields = c.head()
        got = b""
        while len(got) < len(BIG):
            part = c.f.read(min(65536, len(BIG) - len(got)))
            self.assertNotEqual(part, b"", len(got))
            got += part
            time.sleep(0.02)
        self.assertEqual(got == BIG, True)

    def test_an_agent_that_is_gone(self):
        self.agent.on_handoff = lambda s, h: None
        c = Client(timeout=30)
        c.send("/big")
        h = self.agent.wait("handoff")
        self.agent.client_socket(h["handoff"]).close()
        old, self.agent = self.agent, None
        old.close()
        self.assertEqual(c.receive().body == BIG, True)

    def test_a_client_that_has_no_room_waits_for_nobody(self):
        shut = self.agent.shim_path + ".shut"
        open(shut, "w").close()
        self.part(100_000)
        c = Client(timeout=30)
        c.send("/big")
        self.assertEqual(c.head()[0], 200)
        time.sleep(4) # time in which a client whose window has room would get the rest
        self.assertEqual(self.agent.counters()["relayed_stopped"], 0)
        os.unlink(shut)
        self.assertEqual(c.f.read(len(BIG)) == BIG, True)
        self.assertEqual(self.agent.counters()["relayed_stopped"], 1)

    def test_many(self):
        self.part(50_000)
        self.whole_for_many("/big", BIG)


@alone
class StoppedApplication(Application):
    """The agent stops, and the rest comes from an application, whose header and answers a test chooses."""

    def stopped_after(self, bytes, *answers):
        self.application(*answers)
        Stopped.part(self, bytes)

    def rest(self, q):
        first = int(field(q, "Range")[6:].split("-")[0])
        fields = f"ETag: {ETAG}\r\nContent-Range: bytes {first}-{len(BIG) - 1}/{len(BIG)}\r\nSet-Cookie: a=b\r\n"
        head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {len(BIG) - first}\r\n{fields}\r\n"
        return head.encode() + BIG[first:]

    def test_an_agent_that_is_killed_before_the_offer_comes(self):
        def killed(q):
            self.agent.vanish()
            time.sleep(0.05)
            return self.whole(q)

        self.application(killed, *[self.rest] * 9)
        r = Client(timeout=30).get("/raw/x")
        self.assertEqual((r.status, r.body == BIG, r.fields.get("set-cookie")), (200, True, None))

    def test_what_is_asked(self):
        self.stopped_after(5000, self.whole, self.rest)
        r = Client(timeout=30).get("/raw/x", fields="X-A: 1\r\nIf-Range: z\r\n")
        self.assertEqual((r.status, r.body == BIG, r.fields.get("set-cookie")), (200, True, None))
        asked = self.raw.requests[1]
        self.assertEqual((field(asked, "Range"), field(asked, "If-Match")), (f"bytes=5000-{len(BIG) - 1}", ETAG))
        self.assertEqual((field(asked, "X-A"), field(asked, "If-Range"), field(asked, "Shunt-Consent")), ("1", None, None))

    def test_a_client_that_takes_an_ack_back(self):
        self.stopped_after(5000, self.whole, *[self.rest] * 9)
        with open(self.agent.shim_path + ".ahead", "w"):
            pass
        self.assertEqual(Client(timeout=30).get("/raw/x").body == BIG, True)
        asked = [field(q, "Range").split("-")[0] for q in self.raw.requests[1:]] # more requests on a slow machine
        self.assertEqual((asked[0], asked[-1], len(set(asked))), ("bytes=6000", "bytes=5000", 2))
        n = self.agent.counters()
        self.assertEqual((n["relayed_stopped"], n["aborted"], self.agent.handoffs()), (1, 0, 0))

    def reset_after(self, *answers):
        self.stopped_after(5000, *answers)
        with self.assertRaises((ConnectionResetError, ConnectionError)):
            Client(timeout=30).get("/raw/x")
        self.assertEqual(self.agent.counters()["relayed_stopped"], 0)

    def test_without_a_strong_etag_nobody_knows_whether_the_rest_is_of_the_same(self):
        self.reset_after(lambda q: self.whole(q, fields="Accept-Ranges: bytes\r\n"))
        self.assertEqual(len(self.raw.requests), 1)

    def test_answers_that_are_not_the_rest(self):
        rest = f"Content-Range: bytes 5000-{len(BIG) - 1}/{len(BIG)}\r\n"
        for answer in (lambda q: self.answer(q, "200 OK", f"ETag: {ETAG}\r\n", offered=False, body="x"),
                       lambda q: self.answer(q, fields='ETag: "another"\r\n' + rest, offered=False, body="x"),
                       lambda q: self.answer(q, fields=f"ETag: {ETAG}\r\nContent-Range: bytes 0-9/10\r\n", offered=False)):
            with self.subTest(answer):
                self.reset_after(self.whole, answer)
                self.doCleanups()
                self.agent.on_handoff = self.agent.serve
                self.agent.beats.set()
                wait_for(lambda: Client().get("/big").body == BIG and self.is_back())

    def test_after_an_error_it_is_asked_for_again(self):
        self.stopped_after(5000, self.whole, unavailable, unavailable, self.rest)
        self.assertEqual(Client(timeout=30).get("/raw/x").body == BIG, True)
        n = self.agent.counters()
        self.assertEqual((n["relayed_stopped"], n["aborted"], self.agent.handoffs()), (1, 0, 0))

    def test_and_not_for_ever(self):
        self.reset_after(self.whole, *[unavailable] * 5)
        self.assertEqual(len(self.raw.requests), 6)

    def test_a_handoff_that_completes_between_two_questions(self):
        self.stopped_after(5000, self.whole, *[unavailable] * 4, self.rest)
        part, handoffs = self.agent.on_handoff, []
        self.agent.on_handoff = lambda s, h: (handoffs.append(h["handoff"]), part(s, h))
        c = Client(timeout=30)
        c.send("/raw/x")
        self.assertEqual(c.head()[0], 200)
        wait_for(lambda: len(self.raw.requests) >= 4)
        self.agent.ring.post(handoffs[0], len(BIG), agents.COMPLETE)
        wait_for(lambda: self.agent.handoffs() == 0)
        asked = len(self.raw.requests)
        c.send("/text.html")
        c.f.read(5000)
        self.assertEqual((c.head()[0], len(self.raw.requests)), (200, asked))
        self.assertEqual(self.agent.counters()["aborted"], 0)

    def all_comes_meanwhile(self, answer):
        """The backend's kernel sends all, though the agent is stopped, before the first of these answers comes."""
        clients = []

        def some(s, h):
            clients.append(self.agent.client_socket(h["handoff"]))
            self.agent.deliver(clients[0], BIG[:5000])
            self.agent.stop()

        def first(q):
            self.agent.deliver(clients[0], BIG[5000:])
            clients[0].close()
            return answer(q)

        self.application(self.whole, first, *[answer] * 9)
        self.agent.on_handoff = some
        c = Client(timeout=30)
        self.assertEqual(c.get("/raw/x").body == BIG, True)
        self.assertEqual(c.get("/small").body, b"s" * 100)
        n = self.agent.counters()
        self.assertEqual((n["aborted"], self.agent.handoffs()), (0, 0))
        self.assertEqual(self.log()[4:6], [str(len(BIG)), str(len(BIG))])
        return n

    def test_a_client_that_has_all_before_the_rest_comes(self):
        self.all_comes_meanwhile(self.rest)

    def test_a_client_that_has_all_while_the_rest_never_comes(self):
        n = self.all_comes_meanwhile(unavailable)
        self.assertEqual(n["relayed_stopped"], 0)
        self.assertEqual(len(self.raw.requests), 2)

    def test_no_byte_of_a_rest_follows_a_body_that_the_client_has(self):
        """The answer's header fits, but its connection ends before the first byte."""
        self.all_comes_meanwhile(lambda q: self.rest(q).split(b"\r\n\r\n")[0] + b"\r\n\r\n")

    def test_a_client_that_takes_its_claim_back_while_the_rest_never_comes(self):
        self.stopped_after(5000, self.whole, *[unavailable] * 5)
        claims, asked = self.agent.shim_path + ".all", self.agent.shim_path + ".asked"

        def claiming():
            wait_for(lambda: len(self.raw.requests) > 1)
            open(claims, "w").close()
            for _ in range(2):
                if os.path.exists(asked):
                    os.unlink(asked)
                wait_for(lambda: os.path.exists(asked))
            os.unlink(claims)

        claim = threading.Thread(target=claiming)
        claim.start()
        with self.assertRaises(ConnectionError):
            Client(timeout=30).get("/raw/x")
        claim.join()
        self.assertEqual(self.agent.counters()["aborted"], 1)
        self.assertEqual(len(self.raw.requests), 6)

    def is_back(self):
        with open(self.dir + "/access.log") as f:
            return any(" shortcut " in l for l in [l for l in f if l.startswith("8081 /big")][-1:])


class Refused(Base):
    """The backend's agent refuses after the header has left."""

    def refuse(self, reason):
        def no(s, h):
            self.agent.client_socket(h["handoff"]).close()
            self.agent.end(s, h["handoff"], reason, peer=0)
        self.agent.on_handoff = no

    def test_the_body_is_fetched(self):
        c = Client()
        for n, reason in enumerate([NOT_ALLOWED, LIMIT, BUSY], 1):
            self.refuse(reason)
            r = c.get("/big")
            self.assertEqual((r.status, r.body == BIG), (200, True))
            self.assertEqual(self.log(n=n)[3:6], ["fetched:refused", str(len(BIG)), str(len(BIG))])
        n = self.agent.counters()
        self.assertEqual((n["fetched_refused"], n["fetched"], n["shortcuts"], n["aborted"]), (3, 3, 0, 0))
        wait_for(lambda: self.agent.handoffs() == 0)
        said = [l for l in read(self.dir + "/error.log").splitlines() if "refused a handoff" in l]
        self.assertRegex(said[0], r"\[error\].* \"self\" refused a handoff, not allowed by the agent's configuration")
        self.assertLess(len(said), 4)
        self.agent.on_handoff = self.agent.serve
        self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual(self.outcome(n=4), "shortcut")

    def test_a_client_that_is_not_reached_is_relayed_to_for_a_while(self):
        self.refuse(UNREACHABLE)
        c = Client()
        for _ in range(7):
            self.assertEqual(c.get("/big").body == BIG, True)
        refused, vain = "fetched:refused", "relayed:vain"
        self.assertEqual([self.outcome(n=n) for n in range(1, 8)], [refused, vain, refused, vain, vain, vain, refused])

    def test_where_no_client_is_reached_the_location_learns_it(self):
        self.refuse(UNREACHABLE)
        for _ in range(6):
            self.assertEqual(Client().get("/big").body == BIG, True)
        self.assertEqual([self.outcome(n=n) for n in range(4, 7)], ["fetched:refused", "relayed:vain", "fetched:refused"])

    def test_what_a_client_has_is_not_sent_again(self):
        def some(s, h):
            c = self.agent.client_socket(h["handoff"])
            self.agent.deliver(c, self.agent.payload(h["offer"])[:1_000_001])
            c.close()
            self.agent.end(s, h["handoff"], UNREACHABLE, peer=0)
        self.agent.on_handoff = some
        c = Client(timeout=30)
        r = c.get("/big")
        self.assertEqual((r.status, r.body == BIG), (200, True))
        self.assertEqual(self.log()[3:6], ["fetched:refused", str(len(BIG)), str(len(BIG))])

    def all_of_it(self, s, h):
        """Delivers all. But the backend's agent has heard no ACK, and takes the client for unreachable."""
        c = self.agent.client_socket(h["handoff"])
        self.agent.deliver(c, self.agent.payload(h["offer"]))
        c.close()
        self.agent.end(s, h["handoff"], UNREACHABLE, peer=0)

    def test_of_a_client_that_has_all_nothing_is_fetched(self):
        self.agent.on_handoff = self.all_of_it
        c = Client(timeout=30)
        for uri in "/big", "/etagless/big":
            self.assertEqual(c.get(uri).body == BIG, True)
            self.assertEqual(c.get("/small").body, b"s" * 100)
        n = self.agent.counters()
        self.assertEqual((n["fetched"], n["shortcuts"], n["aborted"], self.agent.handoffs()), (0, 2, 0, 0))

    def test_nor_of_one_whose_acks_come_in_the_last_moment(self):
        open(self.agent.shim_path + ".none", "w").close()
        self.test_of_a_client_that_has_all_nothing_is_fetched()

    def test_many(self):
        self.refuse(NOT_ALLOWED)
        bad = []
        def one():
            c = Client()
            for _ in range(5):
                if c.get("/text.html").body != open(self.dir + "/www/text.html", "rb").read():
                    bad.append(1)
        threads = [threading.Thread(target=one) for _ in range(10)]
        [t.start() for t in threads]; [t.join() for t in threads]
        n = self.agent.counters()
        self.assertEqual((bad, n["fetched_refused"] + n["relayed_vain"]), ([], 50))
        self.assertGreater(n["relayed_vain"], 0)  # after refusals, some requests get no consent and are relayed


class Unanswered(Base):
    """The ring (BPF ring buffer that a worker reads) has no room for the kernel's answers."""

    def lose_all(self):
        self.agent.is_answer_lost = lambda: True

    def test_a_handoff_that_nobody_is_told_of_is_fetched(self):
        self.lose_all()
        c = Client()
        self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual(self.log()[3:6], ["fetched:begin", str(len(BIG)), str(len(BIG))])
        n = self.agent.counters()
        self.assertEqual((n["fetched"], n["shortcuts"], n["aborted"]), (1, 0, 0))
        wait_for(lambda: self.agent.handoffs() == 0)

    def test_a_client_that_goes_meanwhile_is_counted_once(self):
        c = Client()
        def leave():
            if c.s.fileno() != -1:
                c.reset()
            return True

        self.agent.is_answer_lost = leave
        c.send("/big")
        self.log()
        self.assertEqual(self.agent.handoffs(), 0)
        self.agent.is_answer_lost = lambda: False
        self.assertEqual(Client().get("/big").body == BIG, True)
        wait_for(lambda: self.agent.handoffs() == 0)

    def test_a_payload_that_is_complete_before_its_beginning_is_answered(self):
        """The event of completion is in the ring before the kernel's answer, or there is no answer. No backend is told
        to send the payload again."""
        def all_of_it(handoff, client):
            with socket.socket(fileno=os.dup(client)) as s:
                self.agent.deliver(s, BIG)
            self.agent.ring.post(handoff, len(BIG), agents.COMPLETE)

        self.agent.before_answer = all_of_it
        c = Client()
        for n, is_lost in enumerate((False, True), 1):
            self.agent.is_answer_lost = lambda: is_lost
            self.assertEqual(c.get("/big").body == BIG, True)
            self.assertEqual(self.outcome(n=n), "shortcut")
        self.agent.before_answer, self.agent.is_answer_lost = lambda *_: None, lambda: False
        self.assertEqual(c.get("/big").body == BIG, True)
        n = self.agent.counters()
        handoffs = [m for m in self.agent.messages if m[0] == "handoff"]
        self.assertEqual((n["shortcuts"], n["aborted"], len(handoffs)), (3, 0, 1))
        wait_for(lambda: self.agent.handoffs() == 0)

    def test_what_lies_behind_an_answer_that_nobody_needs_is_heard(self):
        """The kernel wakes a worker only for a record that is the next one to be read, not for one behind an answer."""
        done = threading.Event()
        def all_but_the_event(s, h):
            c = self.agent.client_socket(h["handoff"])
            self.agent.deliver(c, self.agent.payload(h["offer"]))
            c.close()
            if first:
                first.pop()
                done.wait()
                self.agent.ring.post(h["handoff"], h["length"], agents.COMPLETE)
            else:
                self.agent.end(s, h["handoff"], PEER_LOST, peer=0)

        first = [True]
        self.agent.on_handoff = all_but_the_event
        waits = Client(timeout=30)
        self.assertEqual(waits.get("/etagless/big").body == BIG, True)
        wait_for(lambda: not first)
        # This handoff has no event of completion. Its worker asks the kernel, and learns that the client has all bytes.
        self.assertEqual(Client(timeout=30).get("/etagless/big").body == BIG, True)
        wait_for(lambda: self.agent.handoffs() == 1)
        done.set()
        wait_for(lambda: self.agent.handoffs() == 0)  # due to the event: the worker itself checks only after 15 s

    def test_an_older_answer_is_not_taken_for_it(self):
        """An older answer of the kernel says that the client has less than it really has. If nginx used that answer,
        the client would get bytes twice."""
        def some(s, h):
            connection = self.agent.client_socket(h["handoff"])
            self.agent.deliver(connection, BIG[:50_000])
            time.sleep(2)  # meanwhile nginx asks the kernel for the region's state
            self.lose_all()
            self.agent.deliver(connection, BIG[50_000:100_000])
            connection.close()
            self.agent.stop()

        self.agent.on_handoff = some
        c = Client(timeout=30)
        c.send("/big")
        self.assertEqual(c.head()[0], 200)
        got = b""
        try:
            while part := c.f.read1(65536):
                got += part
        except ConnectionError:
            pass
        self.assertGreaterEqual(len(got), 100_000)
        self.assertEqual(BIG.startswith(got), True)


@alone
class RefusedTls(Tls):
    """A handoff on TLS that is refused: OpenSSL continues with record numbers that nobody has used, under keys that the
    backend does not have."""

    def test_a_handoff_that_nobody_is_told_of_is_fetched(self):
        self.agent.is_answer_lost = lambda: True
        c = TlsClient()
        self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual(self.outcome(1), "fetched:begin")
        self.agent.is_answer_lost = lambda: False
        self.assertEqual(c.get("/big").body == BIG, True)

    def test_the_body_is_fetched(self):
        Refused.refuse(self, NOT_ALLOWED)
        c = TlsClient()
        for n in 1, 2, 3:
            self.assertEqual(c.get("/big").body == BIG, True)
            self.assertEqual(self.outcome(n), "fetched:refused")
        keys = self.handoffs(3)
        self.assertEqual(len({(h["tls_key"], h["tls_iv"]) for h in keys}), 3)
        self.agent.on_handoff = self.serve
        self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual(self.outcome(4), "shortcut")

    def test_nothing_is_sealed_here_when_a_second_backend_refuses(self):
        """The first backend may have sealed records that the client has not acknowledged yet, so nginx must not use
        their numbers."""
        def refuse(s, h):
            self.agent.on_handoff = self.serve
            self.agent.client_socket(h["handoff"]).close()
            self.agent.end(s, h["handoff"], NOT_ALLOWED, peer=0)

        self.ended(0, then=refuse)
        self.assertEqual(TlsClient().get("/big").body == BIG, True)
        keys = self.handoffs(3)
        self.assertEqual(len({(h["tls_key"], h["tls_iv"], h["tls_record"]) for h in keys}), 1)
        self.assertEqual(self.outcome(), "shortcut")
        n = self.agent.counters()
        self.assertEqual((n["fetched_refused"], n["failovers"]), (0, 2))

    def test_a_stopped_agents_payload_ends_in_a_reset(self):
        """The agent may have passed the keys on, and records may be on their way."""
        self.agent.on_handoff = lambda s, h: self.agent.stop()
        c = TlsClient()
        c.s.settimeout(30)
        with self.assertRaises((ConnectionError, ssl.SSLError)):
            c.get("/big")
        self.assertEqual(self.agent.counters()["relayed_stopped"], 0)
