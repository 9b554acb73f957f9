"""The first shortcut (body that bypasses nginx) of a connection: only long bodies get it, unless further ones are
likely to follow. A consent is the request's header field by which the frontend permits the shortcut. run.py runs these
tests."""
from run import BIG, TEXT, Base, Client

ALONE = 256 * 1024  # the default of shunt_alone_length; TEXT is shorter, BIG is longer
CLOSE = "Connection: close\r\n"


class Lifetime(Base):
    def came(self, n, outcome, least):
        """Checks the n-th request: what became of it, and the least length of a body that may get the shortcut. The
        frontend's consent names this length; None: it names none."""
        self.assertEqual(self.outcome(n=n), "shortcut" if outcome == "offered" else "-")
        self.assertEqual(self.outcome(8083, n), outcome)
        consent = self.consent(8083, n)
        self.assertEqual(consent.endswith("; tiers=1") if least is None else f"; from={least}" in consent, True, consent)

    def test_a_body_alone_on_its_connection(self):
        self.assertLess(len(TEXT), ALONE)
        self.assertEqual(Client().get("/text.html", fields=CLOSE).body, TEXT)
        self.came(1, "relayed:short_lived", ALONE)
        self.assertEqual(Client().get("/big", fields=CLOSE).body, BIG)
        self.came(2, "offered", ALONE)
        self.assertEqual(Client().get("/alone0/text.html", fields=CLOSE).body, TEXT)
        self.came(3, "offered", None)
        self.assertEqual(self.agent.counters()["relayed_short_lived"], 1)

    def test_of_http_1_0(self):
        c = Client()
        c.s.sendall(b"GET /text.html HTTP/1.0\r\n\r\n")
        self.assertEqual(c.receive().body, TEXT)
        self.came(1, "relayed:short_lived", ALONE)

    def test_others_may_follow(self):
        c = Client()
        self.assertEqual(c.get("/text.html").body, TEXT)
        self.came(1, "offered", None)
        # The backend has a socket for this client now, so the last body may be short.
        self.assertEqual(c.get("/text.html", fields=CLOSE).body, TEXT)
        self.came(2, "offered", None)

    def test_the_last_one_of_which_none_was_a_shortcut(self):
        c = Client()
        self.assertEqual(c.get("/off/text.html").body, TEXT)
        self.assertEqual(c.get("/text.html", fields=CLOSE).body, TEXT)
        self.came(2, "relayed:short_lived", ALONE)

    def test_what_connections_bring_is_learned(self):
        def part(c):
            self.assertEqual(c.get("/big", fields="Range: bytes=0-99999\r\n").body, BIG[:100000])

        def least(n):
            consent = self.consent(8083, n)
            return int(consent.split("; from=")[1]) if "from=" in consent else 0

        for n in range(120):
            c = Client()
            part(c)
            c.close()
        found = [least(n) for n in range(1, 121)]
        self.assertEqual((found, found[0]), (sorted(found), 0))
        self.assertTrue(100000 < found[-1] < ALONE, found[-1])
        self.came(120, "relayed:short_lived", found[-1])
        # This connection has a second long body, so connections are seen to continue after a long body.
        c = Client()
        part(c)
        part(c)
        self.came(122, "offered", None)
