"""Responses whose offer (a body that a backend holds ready) cannot be used: they are asked for once more, without
consent (the request's header field that permits an offer), before anything has left. Also consents that are not given
because the last ones led to no shortcut. run.py runs these tests."""
import gzip, os, socket, struct, subprocess, sys, threading, unittest

import agent as agents
from configurations import IMAGE_FILTER, png
from consents import CONSENT
from run import BIG, TEXT, Base, Client, Raw, field, read
from wait import wait_for

SSI = b"<p>" + b"x" * 40000 + b'<!--#echo var="uri" --></p>\n'
SHOWN = lambda uri: b"<p>" + b"x" * 40000 + uri + b"</p>\n"

# Program that writes the first peer's epoch (sequence lock) on the board (memory that the agent shares with nginx)
# again and again: an odd value, as while the entry changes, and then always the same even value.
WRITER = "import mmap, struct, sys\nboard = mmap.mmap(int(sys.argv[1]), 4096)\nwhile True:\n" \
    f"    board[{agents.HEAD_BYTES}] = 3\n    board[{agents.HEAD_BYTES}] = 2\n"


class Asked(Base):
    """A frontend's reaction to an offer that it cannot use, and the requests that its upstream then gets."""

    def test_a_board_that_is_being_written_costs_no_response(self):
        os.pwrite(self.agent.board, struct.pack("=I", 3), agents.HEAD_BYTES)
        def answer(q):
            if not field(q, "Shunt-Consent"):
                return b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole"
            value = f"1; backend=self; offer={7:016x}; length=50000; tag={'0' * 32}"
            return f"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nShunt-Payload: {value}\r\nSet-Cookie: a=b\r\n\r\n".encode()
        raw = Raw(answer)
        r = Client().get("/raw/x")
        raw.close()
        self.assertEqual((r.status, r.body), (200, b"whole"))
        self.assertNotIn("set-cookie", r.fields)
        self.assertEqual([bool(field(q, "Shunt-Consent")) for q in raw.requests], [True, False])
        n = self.agent.counters()
        self.assertEqual((n["refused_unknown_peer"], n["asked_again"]), (1, 1))

    def test_a_board_that_changes_all_the_time(self):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(self.agent.board)], pass_fds=[self.agent.board])
        try:
            c = Client()
            for _ in range(500):
                self.assertEqual(c.get("/text.html").body, TEXT)
        finally:
            writer.kill()
            writer.wait()
        self.assertGreater(self.agent.counters()["shortcuts"], 0)

    def test_an_upstream_that_offers_unasked_is_a_bad_gateway(self):
        raw = Raw(lambda q: b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nShunt-Payload: x\r\n\r\n")
        r = Client().get("/raw/x")
        raw.close()
        self.assertEqual((r.status, r.body, len(raw.requests)), (502, b"oops page", 2))

    def refused_once(self, status, more):
        """Sends a request with `more` in a field. The upstream answers requests that have a consent with `status`.
        Returns the client's status and body, and for each request that the upstream got whether it had a consent."""
        def answer(q):
            if field(q, "Shunt-Consent"):
                return f"HTTP/1.1 {status}\r\nContent-Length: 4\r\n\r\nmuch".encode()
            return b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole"
        raw = Raw(answer)
        r = Client().get("/raw/x", fields=f"X-More: {more}\r\n")
        raw.close()
        return r.status, r.body, [bool(field(q, "Shunt-Consent")) for q in raw.requests]

    def test_a_request_that_its_consent_makes_too_long(self):
        for status in "400 Bad Request", "431 Request Header Fields Too Large":
            self.assertEqual(self.refused_once(status, "x" * 1000), (200, b"whole", [True, False]))
        n = self.agent.counters()
        self.assertEqual((n["relayed_long_request"], n["asked_again"]), (2, 2))

    def test_a_request_that_is_refused_for_something_else(self):
        self.assertEqual(self.refused_once("400 Bad Request", "x"), (400, b"much", [True]))
        self.assertEqual(self.refused_once("403 Forbidden", "x" * 1000), (403, b"much", [True]))
        self.assertEqual(self.agent.counters()["asked_again"], 0)

    def test_once(self):
        """A frontend whose upstreams are not trusted stops giving consents, tries again later, and every response is
        whole."""
        c, n = Client(), 40
        for _ in range(n):
            self.assertEqual(c.get("/strange-backend/text.html").body, TEXT)
        counts = self.agent.counters()
        self.assertEqual(counts["refused_untrusted"], counts["asked_again"])
        self.assertEqual(counts["relayed_vain"], n - counts["asked_again"])
        self.assertEqual(counts["asked_again"], 4 + 4)  # the later ones after pauses of 1, 3, 7 and 15 responses

    conf = Base.conf.replace("location /raw/ {{", """
        location /strange-backend/ {{ proxy_pass http://127.0.0.7:8083/; }}
        location /raw/ {{""").replace("listen 127.0.0.2:8083;", "listen 127.0.0.2:8083; listen 127.0.0.7:8083;")


class Silent(Base):
    """Answers of the agent that do not come. The worker does not wait 60 s, as it would for an upstream: it runs the
    request once more."""
    PATIENCE = 30  # seconds

    def whole(self, uri, body, outcome, asked=1):
        c = Client(timeout=self.PATIENCE)
        r = c.get(uri)
        self.assertEqual((r.status, r.body == body), (200, True))
        self.assertClean(r)
        self.assertEqual(self.outcome(), outcome)
        self.assertEqual(self.agent.counters()["asked_again"], asked)
        self.assertEqual(c.get("/small").body, b"s" * 100)  # the connection is still usable

    def fetched(self, *sent):
        """Has the agent answer a fetch with a socket that yields the bytes `sent` and does not end. Without `sent`, the
        agent does not answer."""
        def silent(s, fetch, offer, length):
            for data in sent:
                ours, theirs = socket.socketpair()
                self.addCleanup(ours.close)
                socket.send_fds(s, [struct.pack("=IIQQ", agents.FETCHED, 24, fetch, length)], [theirs.fileno()])
                theirs.close()
                ours.sendall(data)
        self.agent.on_fetch = silent

    def test_a_refused_body(self):
        value = f"1; backend=self; offer={7:016x}; length=50000; tag={'0' * 32}"
        for location, n in ("/raw/x", 1), ("/raw-unbuffered/x", 2):
            with self.subTest(location):
                raw = Held(f"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\nShunt-Payload: {value}\r\n\r\n".encode())
                try:
                    r = Client(timeout=self.PATIENCE).get(location)
                finally:
                    raw.close()
                self.assertEqual((r.status, r.body, len(raw.requests)), (200, b"whole", 2))
                self.assertEqual(self.agent.counters()["asked_again"], n)

    def test_a_fetch_that_is_not_answered(self):
        self.fetched()
        self.whole("/sub/text.html", TEXT.replace(b"needle", b"thread"), "fetched:filter")

    def test_a_fetch_that_brings_nothing(self):
        self.fetched(b"")
        self.whole("/sub/text.html", TEXT.replace(b"needle", b"thread"), "fetched:filter")

    def test_behind_a_header_it_is_waited_for(self):
        """After the header has left, the worker waits for the fetch. Another backend may not have the rest of the same
        response, and without the rest only a reset could follow."""
        self.agent.refusal = lambda handoff: agents.UNPROVEN
        late = threading.Event()
        def slow(*fetch):
            late.wait(self.PATIENCE)
            self.agent.serve_fetch(*fetch)
        self.agent.on_fetch = slow
        waiting = [Client(timeout=self.PATIENCE) for _ in range(2)]
        for c, uri in zip(waiting, ("/nobody/big", "/big")):
            c.send(uri)
            c.head()
        early = Client(timeout=self.PATIENCE)  # its fetch begins later, but is given up sooner: no header has left
        early.send("/sub/text.html")
        wait_for(lambda: self.agent.counters()["fetch_failed"])
        late.set()
        for c in waiting:
            self.assertEqual(c.f.read(len(BIG)) == BIG, True)
        self.assertEqual(early.receive().body, TEXT.replace(b"needle", b"thread"))
        n = self.agent.counters()
        self.assertEqual((n["fetch_failed"], n["relayed_stopped"]), (1, 0))

    conf = Base.conf.replace("location /raw/ {{", """
        location /raw-unbuffered/ {{ proxy_buffering off; proxy_pass http://127.0.0.5:8085/; }}
        location /raw/ {{""")


class Held(Raw):
    """An upstream that gives `answer` to a request with a consent, and then keeps the connection open. It answers
    "whole" to a request without a consent."""

    def __init__(self, answer):
        self.held = []
        super().__init__(lambda q: answer)

    def serve(self, c, request):
        if field(request, "Shunt-Consent"):
            self.held.append(c)
            c.sendall(self.answer(request))
        else:
            c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole")
            c.close()


class NoTrust(Base):
    conf = Base.conf.replace("shunt_trust 127.0.0.2 127.0.0.3 127.0.0.5; shunt on;", "shunt on;")

    def test_costs_the_shortcut(self):
        c = Client()
        for uri in "/big", "/via/big":
            self.assertEqual(c.get(uri).body, BIG)
        self.assertEqual([self.outcome(n=n) for n in (1, 2)], ["relayed:no_trust"] * 2)
        self.assertEqual(self.agent.counters()["offers"], 0)
        lines = [l for l in read(self.dir + "/error.log").splitlines() if '"shunt on" without "shunt_trust"' in l]
        self.assertEqual(len(lines), 1, lines)
        self.assertIn("[error]", lines[0])
        check = subprocess.run(["nginx", "-t", "-c", self.dir + "/conf"], capture_output=True, text=True)
        self.assertEqual(check.stderr.count('"shunt on" without "shunt_trust"'), 1, check.stderr)


class Filtering(Base):
    """Filters of an intermediate, which may need the body."""
    images = os.path.exists(IMAGE_FILTER)
    module = f"{IMAGE_FILTER}; load_module {Base.module}" if images else Base.module
    conf = Base.conf.replace("location /no/ {{", """
        location /gzip/ {{ gzip on; gzip_proxied any; gzip_http_version 1.0; proxy_pass http://backend/; }}
        location /gunzip/ {{ gunzip on; proxy_pass http://backend/; }}
        location /sub/ {{ sub_filter needle thread; sub_filter_once off; proxy_pass http://backend/; }}
        location /ssi/ {{ ssi on; proxy_pass http://backend/; }}
        location /add/ {{ addition_types *; add_after_body /tail; proxy_pass http://backend/; }}
        location = /tail {{ return 200 "tail"; }}
        location /ranges/ {{ proxy_force_ranges on; proxy_pass http://backend/; }}
        location /charset/ {{ charset utf-8; charset_types *; proxy_pass http://backend/; }}
        location /slice/ {{ slice 100k; proxy_set_header Range $slice_range; proxy_pass http://backend/; }}
        location /rate/ {{ limit_rate 100m; proxy_pass http://backend/; }}
        location /unbuffered/ {{ proxy_buffering off; proxy_pass http://backend/; }}
        location /ignoring/ {{ proxy_ignore_headers X-Accel-Limit-Rate; proxy_pass http://backend/; }}
        IMAGE
        location /no/ {{""".replace("IMAGE", "location /image/ {{ image_filter resize 100 -; proxy_pass http://backend/; }}"
                                    if images else "")).replace("location /types/ {{", """
        location /packed/ {{ add_header Content-Encoding gzip; }}
        location /unlimited/ {{ add_header X-Accel-Limit-Rate 0; alias {dir}/www/; }}
        location /types/ {{""")

    def prepare(self):
        os.mkdir(self.dir + "/www/packed")
        for name, data in ("ssi.html", SSI), ("packed/page", gzip.compress(BIG, 1)), ("x.png", png(300, 300)):
            with open(f"{self.dir}/www/{name}", "wb") as f:
                f.write(data)

    def body(self, uri, body, fields="", status=200):
        c = Client()
        r = c.get("/via" + uri, fields=fields)
        self.assertEqual((r.status, r.body == body), (status, True), uri)
        self.assertClean(r)
        c.close()
        return r

    def test_each_gets_the_body(self):
        self.body("/sub/text.html", TEXT.replace(b"needle", b"thread"))
        self.body("/ssi/ssi.html", SHOWN(b"/ssi/ssi.html"))
        self.body("/add/big", BIG + b"tail")
        self.body("/slice/big", BIG)
        self.body("/rate/big", BIG)
        zipped = self.body_of("/gzip/text.html", "Accept-Encoding: gzip\r\n")
        self.assertEqual(gzip.decompress(zipped), TEXT)
        self.assertEqual(self.agent.counters()["shortcuts"], 0)
        self.assertEqual([self.outcome(8082, n) for n in range(1, 7)],
                         ["relayed:filter"] * 4 + ["relayed:limit_rate", "relayed:filter"])

    def body_of(self, uri, fields=""):
        c = Client()
        body = c.get("/via" + uri, fields=fields).body
        c.close()
        return body

    def test_x_accel_limit_rate_of_the_backend_limits_here(self):
        self.body("/limited/big", BIG)
        self.assertEqual((self.outcome(), self.outcome(8082)), ("-", "relayed:limit_rate"))
        n = self.agent.counters()
        self.assertEqual((n["relayed_limit_rate"], n["asked_again"], n["shortcuts"]), (1, 1, 0))

    def test_x_accel_limit_rate_that_limits_nothing_here_costs_no_shortcut(self):
        """X-Accel-Limit-Rate has the same effect as in nginx itself. It limits nothing if nginx does not buffer the
        body, if its value is 0, or if nginx is told to ignore it."""
        for n, uri in enumerate(("/unlimited/big", "/unbuffered/limited/big", "/ignoring/limited/big")):
            self.body(uri, BIG)
            self.assertEqual(self.outcome(n=n + 1), "shortcut", uri)
        self.assertEqual(self.agent.counters()["asked_again"], 0)

    @unittest.skipUnless(images, f"{IMAGE_FILTER} is not there (libnginx-mod-http-image-filter)")
    def test_one_that_holds_the_header_gets_the_body(self):
        picture = self.body_of("/image/x.png")
        self.assertEqual(struct.unpack(">II", picture[16:24]), (100, 100))

    def test_gunzip_gets_the_body(self):
        self.body("/gunzip/packed/page", BIG)

    def test_a_range_that_is_cut_here_is_right(self):
        self.body("/ranges/big", BIG[5:200005], "Range: bytes=5-200004\r\n", 206)

    def test_what_no_filter_wants_still_takes_the_shortcut(self):
        for n, uri in enumerate(("/sub/big", "/ssi/big", "/gzip/big", "/gunzip/big", "/ranges/big", "/charset/big")):
            self.body(uri, BIG)
            self.assertEqual((self.outcome(n=n + 1), self.log(8082, n + 1)[5]), ("shortcut", "0"), uri)
        self.assertEqual(self.agent.counters()["asked_again"], 0)

    def test_it_stops_consenting_and_begins_again(self):
        text = TEXT.replace(b"needle", b"thread")
        for _ in range(30):
            self.body("/sub/text.html", text)
        n = self.agent.counters()
        self.assertEqual((n["asked_again"], n["relayed_vain"]), (4 + 3, 23))
        for more in range(64):
            self.body("/sub/big", BIG)
            if self.agent.counters()["shortcuts"]:
                break
        self.body("/sub/big", BIG)
        self.assertEqual(self.agent.counters()["shortcuts"], 2)


class Fetched(Base):
    """Consents that lead to no shortcut, because the bodies have to be fetched through the agent."""
    conf = Base.conf.replace("location /raw/ {{", """
        location /always/ {{ shunt_mean_length 0; proxy_pass http://backend/; }}
        location /raw/ {{""")

    def outcomes(self, requests, client=None, uri="/big"):
        """Makes requests on this connection, or each on a new one. Returns what became of them, as the access log
        says."""
        before = len([l for l in read(self.dir + "/access.log").splitlines() if l.startswith("8081")])
        for _ in range(requests):
            c = client or Client()
            self.assertEqual(c.get(uri).body, BIG)
            if not client:
                c.close()
        return [self.outcome(n=before + n + 1) for n in range(requests)]

    def test_an_unproven_connection_is_tried_twice_and_stops_no_other(self):
        self.agent.refusal = lambda handoff: agents.UNPROVEN
        found = self.outcomes(10, Client())
        self.assertEqual(found, ["fetched:unproven"] * 2 + ["relayed:vain", "fetched:unproven"] + ["relayed:vain"] * 3 +
                         ["fetched:unproven"] + ["relayed:vain"] * 2)
        self.agent.refusal = lambda handoff: 0
        self.assertEqual(self.outcomes(1), ["shortcut"])

    def test_where_no_connection_is_proven_the_location_stops_and_tries_again(self):
        self.agent.refusal = lambda handoff: agents.UNPROVEN
        found = self.outcomes(30)
        self.assertEqual((found.count("fetched:unproven"), found.count("relayed:vain")), (4 + 3, 23))
        self.agent.refusal = lambda handoff: 0
        wait_for(lambda: self.outcomes(1) == ["shortcut"])
        self.assertEqual(self.outcomes(5), ["shortcut"] * 5)

    def test_nothing_follows_from_what_is_of_the_moment(self):
        c = Client()
        for status, outcome in (agents.UNSENT, "fetched:unsent"), (agents.NO_PEER, "fetched:no_session"):
            self.agent.refusal = lambda handoff: status
            self.assertEqual(self.outcomes(8, c), [outcome] * 8)
        self.agent.refusal = lambda handoff: 0
        self.assertEqual(self.outcomes(1, c), ["shortcut"])

    def test_a_backend_without_the_clients_ip_version_stops_no_connection_that_another_serves(self):
        turns = iter([agents.FAMILY, 0] * 10)
        self.agent.refusal = lambda handoff: next(turns)
        self.assertEqual(self.outcomes(20, Client()), ["fetched:family", "shortcut"] * 10)

    def test_but_where_there_is_no_other_the_location_stops(self):
        self.agent.refusal = lambda handoff: agents.FAMILY
        found = self.outcomes(30)
        self.assertEqual((found.count("fetched:family"), found.count("relayed:vain")), (4 + 3, 23))

    def test_a_backend_whose_agent_refuses_stops_the_location_too(self):
        def no(s, h):
            self.agent.client_socket(h["handoff"]).close()
            self.agent.end(s, h["handoff"], 15, peer=0)

        self.agent.on_handoff = no
        found = self.outcomes(30)
        self.assertEqual((found.count("fetched:refused"), found.count("relayed:vain")), (4 + 3, 23))

    def test_who_wants_to_consents_always(self):
        self.agent.refusal = lambda handoff: agents.FAMILY
        self.assertEqual(self.outcomes(20, Client(), "/always/big"), ["fetched:family"] * 20)

    def test_a_location_stops_consenting(self):
        c = Client()
        for _ in range(30):
            self.assertEqual(c.get("/sub/text.html").body, TEXT.replace(b"needle", b"thread"))
        n = self.agent.counters()
        self.assertEqual((n["fetched"], n["relayed_vain"]), (4 + 3, 23))

    def test_one_location_learns_for_itself(self):
        c = Client()
        for _ in range(5):
            c.get("/sub/text.html")
        self.assertEqual(c.get("/text.html").body, TEXT)
        self.assertEqual(self.outcome(n=6), "shortcut")

    def test_a_refused_connection_stops_at_once_and_others_go_on(self):
        """The kernel refuses a connection, for example one within this machine, or one more than the table of
        connections has room for."""
        refused = lambda: [self.outcome(n=n) for n in range(1, 7)]
        with open(self.dir + "/refuse", "w"):
            c = Client()
            for _ in range(6):
                self.assertEqual(c.get("/big").body, BIG)
        self.assertEqual(refused(), ["fetched:begin", "relayed:vain", "fetched:begin"] + ["relayed:vain"] * 3)
        os.unlink(self.dir + "/refuse")
        self.assertEqual(Client().get("/big").body, BIG)
        self.assertEqual(self.outcome(n=7), "shortcut")
