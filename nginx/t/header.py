"""Responses that are relayed because of their headers' length. Such a header fits into the buffer that a tier (server
on the path) reads it into, but would not fit with an offer's fields. By an offer, a backend announces a body that it
holds ready, and does not send it. A consent is the request's header field by which each tier permits an offer, and
tells its room for the header. run.py runs these tests."""
from consents import consent
from run import TEXT, Base, Client, Raw, field

ROOM = 4096  # default of proxy_buffer_size


class Header(Base):
    conf = Base.conf.replace("location /no/ {{", """
        location /adding/ {{ add_header X-More $arg_more; proxy_pass http://backend/; }}
        location /wide/ {{ proxy_buffer_size 8k; proxy_pass http://backend/; }}
        location /no/ {{""").replace("location /raw/ {{", """
        location /off-via/ {{ shunt off; proxy_pass http://inter/; }}
        location /wide/ {{ proxy_buffer_size 16k; proxy_busy_buffers_size 16k; proxy_pass http://backend/; }}
        location /wide-via/ {{ proxy_buffer_size 16k; proxy_busy_buffers_size 16k; proxy_pass http://inter/; }}
        location /raw-narrow/ {{ proxy_buffer_size 3k; proxy_pass http://127.0.0.5:8085/; }}
        location /raw-other/ {{ fastcgi_buffer_size 3k; proxy_pass http://127.0.0.5:8085/; }}
        location /raw-variable/ {{
            set $there 127.0.0.5; fastcgi_buffer_size 3k; proxy_buffer_size 16k; proxy_busy_buffers_size 16k; proxy_pass http://$there:8085/;
        }}
        location /raw/ {{""").replace("location /types/ {{", """
        location /long/ {{ add_header X-Long $arg_long; alias {dir}/www/; }}
        location /types/ {{""").replace("server {{ # intermediate", """
    server {{ # backend behind a plain tier
        listen 127.0.0.7:8088; root {dir}/www; shunt_trust 127.0.0.9 plain; shunt_offer on;
        location /long/ {{ add_header X-Long $arg_long; alias {dir}/www/; }}
    }}
    server {{ # intermediate""").replace("client_body_temp_path", "shunt_mean_length 0; client_body_temp_path")

    def compared(self, plain, shunt, lengths):
        """Checks that the URI `shunt` gives the same responses as the URI `plain`, for fields of these lengths. Some
        bodies must have taken the shortcut, and some must have been relayed because the offer found no room in the
        header."""
        found = set()
        for n in lengths:
            there, here = (Client().get(uri % ("x" * n)) for uri in (plain, shunt))
            self.assertEqual((here.status, here.body == TEXT), (there.status, there.status == 200), n)
            self.assertClean(here)
            found.add(there.status)
        self.assertEqual(found, {200, 502})  # some headers are too long for plain nginx, too
        n = self.agent.counters()
        self.assertGreater(n["shortcuts"], 0)
        self.assertGreater(n["relayed_header"], 0)
        return n

    def test_what_fits_without_an_offer_is_whole(self):
        n = self.compared("/off/long/text.html?long=%s", "/long/text.html?long=%s",
                          [0, 1000, 2000, *range(2800, 3500, 100), *range(3500, ROOM, 11)])
        self.assertEqual(n["asked_again"], 0)

    def test_an_intermediate_whose_own_fields_come_on_top_relays_what_no_longer_fits(self):
        n = self.compared(*(f"/{via}/adding/long/text.html?long={'x' * 1000}&more=%s" for via in ("off-via", "via")),
                          [0, 500, *range(1500, 2500, 100), *range(2500, ROOM - 1000, 11)])
        self.assertEqual(n["asked_again"], n["relayed_header"])

    def test_where_there_is_room_it_takes_the_shortcut(self):
        for n, uri in enumerate(("/wide/", "/wide-via/wide/")):
            self.assertEqual(Client().get(f"{uri}long/text.html?long={'x' * 5000}").body, TEXT)
            self.assertEqual(self.outcome(n=n + 1), "shortcut")

    def test_a_consent_tells_the_least_room_of_all_that_give_it(self):
        for n, (uri, told) in enumerate((("/text.html", ""), ("/wide/text.html", "; header=16384"),
                                         ("/via/wide/text.html", ""), ("/wide-via/text.html", ""),
                                         ("/wide-via/wide/text.html", "; header=8192"))):
            self.assertEqual(Client().get(uri).body, TEXT)
            self.assertRegex(self.consent(8083, n + 1), rf"; tiers=\d(; from=\d+)?{told}$", uri)

    def test_it_tells_that_of_the_module_that_asks(self):
        raw = Raw(lambda q: b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        for uri in "/raw-narrow/x", "/raw-other/x", "/raw-variable/x":
            Client().get(uri)
        raw.close()
        told = [field(q, "Shunt-Consent").partition("; tiers=1")[2] for q in raw.requests]
        self.assertEqual(told, ["; header=3072", "", "; header=3072"])

    def offered(self, n, more="", address=("127.0.0.2", 8083), meant=("127.0.0.2", 8083)):
        c = Client(*address, source="127.0.0.9")
        value = consent(*meant, more=f"; tiers=1{more}")
        c.send(f"/long/text.html?long={'x' * n}", fields=f"Shunt-Consent: {value}\r\n")
        _, fields = c.head()
        c.close()
        return "shunt-payload" in fields

    def test_a_backend_takes_the_word_for_it(self):
        self.assertEqual([self.offered(5000, more) for more in ("", "; header=5000", "; header=8192")], [False, False, True])
        self.assertEqual([self.offered(1000, more) for more in ("", "; header=1024", "; header=1")], [True, False, False])

    def test_nobody_knows_what_a_plain_tier_takes(self):
        """A consent may say that there is more room for a header than nginx's default. If the consent was meant for
        another server, this is not believed."""
        other = {"address": ("127.0.0.7", 8088), "meant": ("127.0.0.8", 8088)}
        self.assertEqual([self.offered(n, "; header=16384", **other) for n in (1000, 5000)], [True, False])
        self.assertEqual(self.offered(5000, "; header=16384", address=("127.0.0.7", 8088), meant=("127.0.0.7", 8088)), True)
