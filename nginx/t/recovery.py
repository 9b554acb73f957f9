"""Handoffs that their backend does not finish, and that another backend continues. A handoff lets a backend send a body
on the client's connection. run.py runs these tests, with its tiers and its client.

One agent (agent.py) is the agent of every backend in these tests. It "loses" a handoff by sending ENDED. The request
for the rest goes to nginx's own static files, or to an application at 127.0.0.5 whose answers a test chooses.
"""
import os, re, struct, threading, time

import agent as agents
from run import BIG, Base, Client, Raw, field, read
from wait import PATIENCE, wait_for

FILE_CHANGED, SOCKET, PEER_LOST, LIMIT = 5, 6, 7, 9
ETAG = '"the-same"'


class Lost(Base):
    def lose(self, *parts, reason=PEER_LOST):
        """Has each of the next handoffs end without success: `parts` says after how many acknowledged bytes. All later
        handoffs are served."""
        left = list(parts)

        def some(s, h):
            if not left:
                return self.agent.serve(s, h)
            c = self.agent.client_socket(h["handoff"])
            self.agent.deliver(c, self.agent.payload(h["offer"])[:left.pop(0)])
            c.close()
            self.agent.end(s, h["handoff"], reason)

        self.agent.on_handoff = some

    def handoffs(self):
        return [m[1]["length"] for m in self.agent.messages if m[0] == "handoff"]

    def goes_on(self, uri, *parts, body=BIG, fields="", reason=PEER_LOST):
        self.lose(*parts, reason=reason)
        c = Client()
        r = c.get(uri, fields=fields)
        self.assertEqual(r.body == body, True)
        self.assertClean(r)
        self.assertEqual(r.fields["content-length"], str(len(body)))
        self.assertEqual(self.log()[3:6], ["shortcut", str(len(body)), str(len(body))])
        rests = [len(body) - sum(parts[:n]) for n in range(len(parts) + 1)]
        self.assertEqual(self.handoffs(), rests)
        n = self.agent.counters()
        self.assertEqual((n["failovers"], n["failover_failed"], n["aborted"]), (len(parts), 0, 0))
        self.assertEqual((n["shortcuts"], n["shortcut_bytes"]), (1, len(body)))
        self.agent.on_handoff = self.agent.serve
        self.assertEqual(c.get(uri, fields=fields).body == body, True)  # the connection is still usable
        self.log(n=2)
        return r

    def ends_in_a_reset(self, uri="/big"):
        with self.assertRaises(ConnectionResetError):
            Client().get(uri)
        wait_for(lambda: self.agent.counters()["aborted"] == 1)
        self.assertEqual(self.log()[3], "shortcut")


class Recovery(Lost):
    def test_another_goes_on(self):
        self.goes_on("/big", 100_000)
        self.assertEqual([self.log(8083, n)[2] for n in (1, 2)], ["200", "206"])

    def test_before_the_first_byte(self):
        self.goes_on("/big", 0)

    def test_through_an_intermediate(self):
        self.goes_on("/via/big", 1_000_000)
        self.assertEqual(self.log(8082, 2)[2], "206")

    def test_a_rest_that_is_too_short_for_an_offer_of_its_own(self):
        self.goes_on("/big", len(BIG) - 100)

    def test_a_part_that_the_client_asked_for(self):
        self.goes_on("/big", 70_000, body=BIG[1000:2_001_000], fields="Range: bytes=1000-2000999\r\n")

    def test_a_client_with_conditions_of_its_own(self):
        self.goes_on("/big", 70_000, fields='If-None-Match: "x"\r\nIf-Range: "y"\r\nIf-Modified-Since: z\r\n')

    def test_lost_again_and_again(self):
        self.goes_on("/big", 1000, 0, 500_000, 1, 0, 0, 100_000)

    def test_a_backend_that_lives_but_cannot(self):
        for reason in SOCKET, LIMIT:
            with self.subTest(reason):
                self.lose(0, reason=reason)
                self.assertEqual(Client().get("/big").body == BIG, True)

    def test_where_nobody_can_the_rest_is_relayed(self):
        self.lose(100_000, *[0] * 9)
        c = Client()
        self.assertEqual(c.get("/big").body == BIG, True)
        first, *others = self.handoffs()
        self.assertEqual((first, set(others)), (len(BIG), {len(BIG) - 100_000}))
        self.assertLessEqual(len(others), 5)  # fewer if the machine is too busy to ask five times in 2.5 s
        n = self.agent.counters()
        self.assertEqual((n["failover_failed"], n["relayed_stopped"], n["aborted"]), (1, 1, 0))
        self.assertEqual(c.get("/small").body, b"s" * 100)

    def test_a_file_that_was_written_to_is_not_gone_on_with(self):
        self.lose(100_000, reason=FILE_CHANGED)  # the ETag is unchanged
        self.ends_in_a_reset()
        self.assertEqual(self.handoffs(), [len(BIG)])

    def test_a_client_that_is_gone_is_not_served_on(self):
        for reason in 8, 14:
            self.lose(0, reason=reason)
            with self.assertRaises(ConnectionResetError):
                Client().get("/big")
        self.assertEqual(self.agent.counters()["failovers"], 0)

    def test_a_backend_that_does_not_send_as_this_server_does_not_go_on(self):
        def lost(s, h):
            self.agent.set_prefixes(["192.0.2.1/32"])
            self.agent.client_socket(h["handoff"]).close()
            self.agent.end(s, h["handoff"], PEER_LOST)

        self.agent.on_handoff = lost
        self.assertEqual(Client().get("/big").body == BIG, True)  # the rest is relayed
        self.assertEqual((self.handoffs(), self.agent.counters()["failovers"]), ([len(BIG)], 0))

    def test_a_late_end_of_the_lost_handoff_is_too_late(self):
        ends = []

        def one(s, h):
            ends.append((s, h["handoff"]))
            if len(ends) == 1:
                return self.agent.end(s, h["handoff"], PEER_LOST)
            self.agent.end(*ends[0], PEER_LOST)
            self.agent.ring.post(ends[0][1], 5, agents.RESET)
            self.agent.serve(s, h)

        self.agent.on_handoff = one
        self.assertEqual(Client().get("/big").body == BIG, True)
        self.assertEqual(self.agent.counters()["failovers"], 1)


class Proof(Lost):
    """`shunt_recover digest`: a backend continues only if its file's digest (SHA-256) proves that it has the same
    file."""

    def asked(self):
        return [m[1] for m in self.agent.messages if m[0] == "prove"]

    def digests(self, *told):
        """Sets which digests the agent tells: first for the handoff, and then for each offer of the rest. Each item has
        arguments of tell_digest, or is None for no answer. After the last item, the agent tells the right digest."""
        left = list(told)

        def tell(s, id, number):
            how = left.pop(0) if left else {}
            if how is not None:
                self.agent.tell_digest(s, id, number, **how)

        self.agent.on_digest = tell

    def unproven(self, *told, asked=1):
        self.digests(*told)
        self.lose(100_000, reason=PEER_LOST if asked else SOCKET)
        self.ends_in_a_reset("/digest/big")
        n = self.agent.counters()
        self.assertEqual((n["failovers"], n["failover_failed"], n["failover_unproven"]), (0, 0, 1))
        self.assertEqual((len(self.handoffs()), len(self.asked())), (1, asked))

    def test_the_same_file(self):
        self.goes_on("/digest/big", 100_000)
        peer, _, length, _ = self.asked()[0]
        self.assertEqual((peer, length), (0, len(BIG) - 100_000))

    def test_again_and_again(self):
        self.goes_on("/digest/big", 1000, 0, 500_000)
        self.assertEqual(len(self.asked()), 3)

    def test_a_part_that_the_client_asked_for(self):
        self.goes_on("/digest/big", 70_000, body=BIG[1000:2_001_000], fields="Range: bytes=1000-2000999\r\n")

    def test_another_file(self):
        self.unproven({}, {"add": b"x"})

    def test_another_place_in_the_same_file(self):
        self.unproven({}, {"wrong_by": 1})

    def test_nobody_knows_what_was_sent(self):
        self.unproven(None, asked=0)

    def test_the_file_has_changed_since(self):
        def tell(s, id, number):
            self.agent.tell_digest(s, id, number)
            self.agent.tell_digest(s, id, number, known=0)

        self.agent.on_digest = tell
        self.lose(100_000, reason=SOCKET)
        self.ends_in_a_reset("/digest/big")
        self.assertEqual((self.asked(), self.agent.counters()["failover_unproven"]), ([], 1))
        handoff = self.agent.wait("handoff")
        self.assertEqual(self.agent.wait("withdrawn"), (handoff["peer"], handoff["handoff"]), "its agent hears of it")

    def test_nobody_knows_what_is_offered(self):
        self.unproven({}, {"known": 0})

    def test_no_answer(self):
        self.unproven({}, None)

    def test_what_another_backend_says_counts_for_nothing(self):
        self.unproven({"peer": 1}, asked=0)

    def test_an_etag_is_enough_where_nothing_is_said(self):
        self.goes_on("/big", 100_000)
        self.assertEqual(self.asked(), [])
        self.assertEqual([m[1]["options"] & agents.OPTION_DIGEST for m in self.agent.messages if m[0] == "handoff"], [0] * 3)

    def test_nobody_is_to_go_on(self):
        self.lose(100_000, reason=SOCKET)
        self.ends_in_a_reset("/nobody/big")
        self.assertEqual(self.handoffs(), [len(BIG)])


def unavailable(q):
    return b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


def precondition_failed(q):
    return b"HTTP/1.1 412 Precondition Failed\r\nContent-Length: 0\r\n\r\n"


def not_found(q):
    return b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhello"


class Application(Lost):
    """An application's header decides whether the rest is asked for, and its answer decides which backend continues."""

    def offer(self, q, length, number, key=b"K" * 16):
        nonce = bytes.fromhex(re.search("nonce=([0-9a-f]{32})", q).group(1))
        tag = agents.siphash128(key, nonce + struct.pack("<QQ", number, length))
        return f"Shunt-Payload: 1; backend=self; offer={number:016x}; length={length}; tag={tag.hex()}\r\n"

    def answer(self, q, status="206 Partial Content", fields=None, offered=True, body="", **change):
        """Returns an answer with the range that the request asks for, or with the whole file. By default, the answer is
        an offer."""
        asked = field(q, "Range")
        first, last = map(int, asked[6:].split("-")) if asked else (0, len(BIG) - 1)
        number, length = len(self.raw.requests), change.pop("length", last + 1 - first)
        self.agent.offers[number] = (os.open(self.dir + "/www/big", os.O_RDONLY), first, last + 1 - first, b"")
        if fields is None:
            fields = f"ETag: {ETAG}\r\nContent-Range: bytes {first}-{last}/{len(BIG)}\r\n"
        offer = self.offer(q, length, number, **change) if offered else ""
        return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{fields}{offer}\r\n{body}".encode()

    def whole(self, q, fields=f"ETag: {ETAG}\r\nAccept-Ranges: bytes\r\n"):
        return self.answer(q, "200 OK", fields)

    def application(self, *answers):
        left = list(answers)
        self.raw = Raw(lambda q: left.pop(0)(q))
        self.addCleanup(self.raw.close)

    def refused(self, *answers, asked=1):
        self.application(self.whole, *answers)
        self.lose(*[1000] * 9)
        self.ends_in_a_reset("/raw/x")
        self.assertEqual(len(self.raw.requests), 1 + asked)
        self.assertEqual((self.agent.counters()["failovers"], self.agent.counters()["failover_failed"]), (0, min(asked, 1)))

    def test_a_loss_that_is_told_again_leaves_the_rest_that_is_on_its_way(self):
        """An agent reports a loss again every second while the payload is in progress."""
        def rest(q):
            if "Shunt-Consent" in q:
                return unavailable(q)
            s, _, handoff = self.lost[0]
            for _ in range(3):
                self.agent.end(s, handoff, PEER_LOST)
            # When the worker answers this request, the worker has read the agent's three messages, which came earlier.
            Client().get("/small")
            return self.answer(q, offered=False).replace(b"Length: 0", b"Length: %d" % (len(BIG) - 1000)) + BIG[1000:]

        self.application(self.whole, *[rest] * 20)
        self.lost_after(1000)
        self.assertEqual(Client().get("/raw/x").body == BIG, True)
        n = self.agent.counters()
        self.assertEqual((n["failover_failed"], n["relayed_stopped"], n["aborted"]), (1, 1, 0))

    def test_a_payload_that_completes_all_the_same_leaves_no_request_for_its_rest(self):
        """If the request for the rest stayed, the connection's next request would have to wait until that request is
        answered."""
        answered = threading.Event()

        def rest(q):
            answered.wait(60)
            return self.answer(q)

        def lost(s, h):
            asked = len(self.raw.requests)
            c = self.agent.client_socket(h["handoff"])
            self.agent.write(c, BIG[:1000])
            self.agent.end(s, h["handoff"], PEER_LOST)
            wait_for(lambda: len(self.raw.requests) > asked)
            self.agent.deliver(c, BIG[1000:])
            self.agent.ring.post(h["handoff"], len(BIG), agents.COMPLETE)
            c.close()

        self.application(self.whole, rest)
        self.agent.on_handoff = lost
        c = Client(timeout=50)
        self.assertEqual(c.get("/raw/x").body == BIG, True)
        self.assertEqual(c.get("/small").body, b"s" * 100)
        answered.set()
        self.assertNotIn("upstream timed out", read(self.dir + "/error.log"))  # /small did not wait for a timeout

    def test_what_is_asked(self):
        self.application(self.whole, self.answer)
        self.lose(1000)
        r = Client().get("/raw/x", fields="X-A: 1\r\nIf-Range: z\r\nCookie: c=d\r\n")
        self.assertEqual(r.body == BIG, True)
        first, rest = self.raw.requests
        self.assertEqual((field(rest, "Range"), field(rest, "If-Match")), (f"bytes=1000-{len(BIG) - 1}", ETAG))
        self.assertEqual((field(rest, "X-A"), field(rest, "Cookie"), field(rest, "If-Range")), ("1", "c=d", None))
        self.assertRegex(field(rest, "Shunt-Consent"), r"^1; frontend=self; nonce=[0-9a-f]{32}; to=[0-9a-f]{16}; tiers=1; rest=1$")
        self.assertEqual(len(re.findall("Shunt-Consent", rest)), 1)
        nonces = [re.search("nonce=([0-9a-f]{32})", q).group(1) for q in (first, rest)]
        self.assertNotEqual(*nonces)

    conf = Base.conf.replace("location /raw/ {{", """
        location /raw-wide/ {{
            proxy_buffer_size 16k; proxy_busy_buffers_size 16k; proxy_pass http://127.0.0.5:8085/;
        }}
        location /raw/ {{""")

    def test_the_room_for_its_header_is_told_too(self):
        self.application(self.whole, self.answer)
        self.lose(1000)
        self.assertEqual(Client().get("/raw-wide/x").body == BIG, True)
        self.assertRegex(field(self.raw.requests[1], "Shunt-Consent"), "; tiers=1; rest=1; header=16384$")

    def test_nothing_of_the_answer_reaches_the_client(self):
        fields = f"ETag: {ETAG}\r\nContent-Range: bytes 1000-{len(BIG) - 1}/{len(BIG)}\r\nSet-Cookie: a=b\r\n"
        self.application(self.whole, lambda q: self.answer(q, fields=fields))
        self.lose(1000)
        r = Client().get("/raw/x")
        self.assertEqual((r.status, r.body == BIG, r.fields.get("set-cookie")), (200, True, None))

    def test_weak_etag(self):
        self.application(lambda q: self.whole(q, f"ETag: W/{ETAG}\r\nAccept-Ranges: bytes\r\n"))
        self.not_asked()

    def test_no_etag(self):
        self.application(lambda q: self.whole(q, "Accept-Ranges: bytes\r\n"))
        self.not_asked()

    def test_no_ranges(self):
        self.application(lambda q: self.whole(q, f"ETag: {ETAG}\r\n"))
        self.not_asked()

    def test_a_part_of_something_of_unknown_length(self):
        of = lambda q: self.answer(q, fields=f"ETag: {ETAG}\r\nContent-Range: bytes 0-{len(BIG) - 1}/*\r\n")
        self.application(of)
        self.not_asked()

    def not_asked(self):
        self.lose(1000, reason=SOCKET)
        self.ends_in_a_reset("/raw/x")
        self.assertEqual(len(self.raw.requests), 1)

    def test_other_etag(self):
        self.refused(lambda q: self.answer(q).replace(ETAG.encode(), b'"another."'))

    def test_weak_etag_of_the_rest(self):
        self.refused(lambda q: self.answer(q).replace(ETAG.encode(), b"W/" + ETAG.encode()))

    def test_no_etag_of_the_rest(self):
        self.refused(lambda q: self.answer(q).replace(b"ETag", b"X-Tag"))

    def test_other_range(self):
        size = len(BIG)
        for text in (f"1001-{size - 1}/{size}", f"1000-{size - 2}/{size}", f"1000-{size - 1}/{size + 1}",
                     f"1000-{size - 1}/*", f"1000-{size - 1}", "", f"-{size}", "9" * 40,
                     f"18446744073709552616-{size - 1}/{size}"):
            with self.subTest(text):
                fields = f"ETag: {ETAG}\r\nContent-Range: bytes {text}\r\n"
                self.application(self.whole, lambda q: self.answer(q, fields=fields))
                self.lose(1000)
                with self.assertRaises(ConnectionResetError):
                    Client().get("/raw/x")
                self.assertEqual(len(self.raw.requests), 2)
                self.raw.close()
                self._cleanups.pop()
        self.assertEqual(self.agent.counters()["failovers"], 0)

    def test_the_whole_again(self):
        self.refused(self.whole)

    def test_servers_with_another_version_and_without_the_file_are_passed_over(self):
        """While files are rolled out, servers differ."""
        self.application(self.whole, precondition_failed, not_found, self.answer)
        self.lose(1000)
        self.assertEqual(Client().get("/raw/x").body == BIG, True)
        self.assertEqual(len(self.raw.requests), 4)
        said = read(self.dir + "/error.log")
        self.assertIn("another ETag (412); copy files with their times", said)
        self.assertIn("no such file (404)", said)

    def test_where_nobody_has_that_version_any_more(self):
        self.application(self.whole, *[precondition_failed] * 20)
        self.lose(1000)
        self.ends_in_a_reset("/raw/x")
        n = self.agent.counters()
        self.assertEqual((n["failovers"], n["failover_failed"], n["relayed_stopped"]), (0, 1, 0))
        consents = [bool(field(q, "Shunt-Consent")) for q in self.raw.requests]
        self.assertEqual(consents.count(False), 5)  # the rest is asked for without a consent, too

    def test_answers_without_an_offer_are_relayed_in_the_end(self):
        def answer(q):
            return self.answer(q, offered=False).replace(b"Length: 0", b"Length: %d" % (len(BIG) - 1000)) + BIG[1000:]

        self.application(self.whole, *[answer] * 9)
        self.lose(1000)
        self.assertEqual(Client(timeout=30).get("/raw/x").body == BIG, True)
        consents = [bool(field(q, "Shunt-Consent")) for q in self.raw.requests]
        self.assertEqual(consents, [True] * (len(consents) - 1) + [False])
        self.assertIn(len(consents), range(5, 8)) # fewer on a slow machine: the time is limited, too

    def test_forged_offer(self):
        self.refused(lambda q: self.answer(q, key=b"X" * 16))
        self.assertEqual(self.agent.counters()["refused_tag"], 1)

    def test_offer_of_another_length(self):
        self.refused(lambda q: self.answer(q, length=1000))

    def test_offer_with_a_body(self):
        self.refused(lambda q: self.answer(q, body="hello"))

    def test_an_error_first(self):
        self.application(self.whole, unavailable, lambda q: b"", self.answer)
        self.lose(1000)
        self.assertEqual(Client().get("/raw/x").body == BIG, True)
        self.assertEqual(len(self.raw.requests), 4)

    def test_client_gone_meanwhile(self):
        for end in Client.close, Client.reset:
            go = threading.Event()
            self.application(self.whole, lambda q: go.wait(PATIENCE) and self.answer(q))
            self.lose(1000)
            c = Client()
            c.send("/raw/x")
            wait_for(lambda: len(self.raw.requests) == 2)
            end(c)
            self.agent.wait("abort")
            go.set()
            self.raw.close()
            self._cleanups.pop()
            self.assertEqual(Client().get("/big").body == BIG, True)

    def test_complete_meanwhile(self):
        """The lost backend's kernel had the whole payload, and sends it while the rest is asked for."""
        go = threading.Event()
        self.application(self.whole, lambda q: go.wait(PATIENCE) and self.answer(q))

        def all_of_it(s, h):
            c = self.agent.client_socket(h["handoff"])
            self.agent.deliver(c, BIG[:1000])
            self.agent.end(s, h["handoff"], PEER_LOST)
            wait_for(lambda: len(self.raw.requests) == 2)
            self.agent.deliver(c, BIG[1000:])
            c.close()
            self.agent.ring.post(h["handoff"], len(BIG), agents.COMPLETE)

        self.agent.on_handoff = all_of_it
        c = Client()
        self.assertEqual(c.get("/raw/x").body == BIG, True)
        time.sleep(0.1)
        go.set()
        self.agent.on_handoff = self.agent.serve
        self.assertEqual(c.get("/big").body == BIG, True)
        self.assertEqual([self.log(n=n)[3] for n in (1, 2)], ["shortcut"] * 2)
        self.assertEqual((self.agent.counters()["failovers"], len(self.handoffs())), (0, 2))

    # A lost backend's kernel may still send. In the next tests it sends the whole payload, but nobody tells nginx that
    # the payload is complete, because the backend's agent is gone.

    def lost_after(self, bytes):
        """Has the next handoff's backend be lost after `bytes`. Returns a function that delivers the other bytes."""
        lost = []

        def some(s, h):
            c = self.agent.client_socket(h["handoff"])
            self.agent.deliver(c, BIG[:bytes])
            lost.append((s, c, h["handoff"]))
            self.agent.end(s, h["handoff"], PEER_LOST)

        def all_comes():
            self.agent.deliver(lost[0][1], BIG[bytes:])
            lost[0][1].close()

        self.agent.on_handoff = some
        self.lost = lost
        return all_comes

    def is_complete(self, requests):
        c = Client(timeout=30)
        self.assertEqual(c.get("/raw/x").body == BIG, True)
        self.assertEqual(c.get("/small").body, b"s" * 100)
        n = self.agent.counters()
        self.assertEqual((n["aborted"], n["failovers"], n["relayed_stopped"], self.agent.handoffs()), (0, 0, 0, 0))
        self.assertEqual(len(self.raw.requests), requests)
        self.assertEqual(self.log()[3:6], ["shortcut", str(len(BIG)), str(len(BIG))])

    def complete_after(self, answer):
        """The client gets all while the rest is asked for, before this answer comes."""
        def rest(q):
            all_comes()
            return answer(q)

        self.application(self.whole, rest)
        all_comes = self.lost_after(1000)
        self.is_complete(requests=2)

    def test_complete_though_the_rest_is_refused(self):
        self.complete_after(lambda q: self.answer(q).replace(ETAG.encode(), b'"another."'))

    def test_complete_though_the_rest_is_offered(self):
        self.complete_after(self.answer)
        self.assertEqual(self.handoffs(), [len(BIG)])

    def test_complete_though_the_rest_is_an_error(self):
        self.complete_after(unavailable)

    def test_complete_before_the_rest_is_asked_for_again(self):
        pauses = threading.Event()

        def rest(q):
            threading.Thread(target=lambda: (wait_for(lambda: "cannot be used" in read(self.dir + "/error.log")),
                                             all_comes(), pauses.set())).start()
            return unavailable(q)

        self.application(self.whole, rest, unavailable)
        all_comes = self.lost_after(1000)
        c = Client(timeout=30)
        self.assertEqual(c.get("/raw/x").body == BIG, True)
        pauses.wait(30)
        wait_for(lambda: self.agent.handoffs() == 0)
        n = self.agent.counters()
        self.assertEqual((n["aborted"], n["failover_failed"]), (0, 0))
        # On a slow machine, the next request may have left before all bytes came.
        self.assertIn(len(self.raw.requests), (2, 3))

    def test_complete_where_nobody_else_can(self):
        self.application(lambda q: self.whole(q, ""))
        all_comes = self.lost_after(1000)

        def told_again():
            """An agent reports a loss again every second."""
            wait_for(lambda: "handoff ended" in read(self.dir + "/error.log"))
            all_comes()
            s, _, handoff = self.lost[0]
            while self.agent.handoffs():
                self.agent.end(s, handoff, PEER_LOST)
                time.sleep(0.2)

        agent = threading.Thread(target=told_again)
        agent.start()
        self.is_complete(requests=1)
        agent.join()

    def test_where_nobody_else_can_a_lost_backend_is_given_time(self):
        self.application(lambda q: self.whole(q, ""))

        def slowly(s, h):
            c = self.agent.client_socket(h["handoff"])
            for at in range(0, len(BIG), len(BIG) // 4):
                self.agent.deliver(c, BIG[at:at + len(BIG) // 4])
                time.sleep(1)
                self.agent.end(s, h["handoff"], PEER_LOST)
            c.close()
            self.agent.ring.post(h["handoff"], len(BIG), agents.COMPLETE)

        self.agent.on_handoff = slowly
        self.assertEqual(Client().get("/raw/x").body == BIG, True)

    def test_but_not_for_ever(self):
        self.application(lambda q: self.whole(q, ""))

        def stuck(s, h):
            c = self.agent.client_socket(h["handoff"])
            c.close()
            for _ in range(10):
                self.agent.end(s, h["handoff"], PEER_LOST)
                time.sleep(1)

        self.agent.on_handoff = stuck
        self.ends_in_a_reset("/raw/x")
