"""The module together with other parts of nginx: other upstreams, other methods to send a file, several workers, error
pages, redirects by header field. An offer is a body that a backend holds ready. A consent is the request's header field
by which each tier (server on the path) permits an offer. run.py runs these tests, with its tiers and its client.

Addresses of the tests' own applications (upstreams without nginx): 127.0.0.5, which the frontend trusts, and 127.0.0.6,
which no tier trusts.
"""
import os, re, socket, struct, subprocess, threading, unittest, zlib

import agent as agents
from consents import CONSENT
from run import BIG, HEAD, TEXT, Base, Client, Raw
from wait import wait_for


CONF = HEAD + """
    fastcgi_cache_path {dir}/cache keys_zone=z:1m;
    fastcgi_param REQUEST_URI $request_uri; uwsgi_param REQUEST_URI $request_uri;

    server {{ # backend
        listen 127.0.0.2:8083 reuseport; root {dir}/www; shunt_trust 127.0.0.9; shunt_offer on; charset off;
        location /fastcgi/ {{ fastcgi_pass 127.0.0.6:9000; }}
        location /fastcgi-cached/ {{
            fastcgi_pass 127.0.0.6:9000; fastcgi_cache z; fastcgi_cache_key $uri; fastcgi_cache_valid 200 1m;
        }}
        location /uwsgi/ {{ uwsgi_pass 127.0.0.6:9001; }}
        location /threads/ {{ aio threads; alias {dir}/www/; }}
        location /threads-memory/ {{ aio threads; sendfile off; alias {dir}/www/; }}
        location /directio/ {{ directio 512; alias {dir}/www/; }}
        location /directio-threads/ {{ directio 512; aio threads; output_buffers 2 128k; alias {dir}/www/; }}
        location /protected/ {{ internal; alias {dir}/www/; }}
        location /page/ {{ error_page 404 /big; }}
        location /other-status/ {{ error_page 404 =200 /big; }}
        location /app/ {{ proxy_pass http://127.0.0.6:8085; }}
        location /intercepted/ {{ proxy_pass http://127.0.0.6:8085; proxy_intercept_errors on; error_page 404 /big; }}
    }}
    server {{ # frontend
        listen 127.0.0.4:8081 reuseport; shunt_trust 127.0.0.2 127.0.0.5; shunt on;
        location / {{ proxy_pass http://127.0.0.2:8083; }}
        location /fastcgi-here/ {{ fastcgi_pass 127.0.0.6:9000; }}
        location /fastcgi-here-trusted/ {{ fastcgi_pass 127.0.0.5:9000; }}
        location /uwsgi-here/ {{ uwsgi_pass 127.0.0.6:9001; }}
        location /local-page/ {{
            proxy_pass http://127.0.0.2:8083/; proxy_intercept_errors on; error_page 404 /static/big;
        }}
        location /next-page/ {{
            proxy_pass http://127.0.0.2:8083/; proxy_intercept_errors on; error_page 404 =200 /big;
        }}
        location /intercept/ {{
            proxy_pass http://127.0.0.2:8083/; proxy_intercept_errors on; error_page 403 404 500 /static/text.html;
        }}
        location /static/ {{ alias {dir}/www/; }}
        IMAGES
    }}
}}
"""


class Application(threading.Thread):
    """An application that gives a CGI response: `answer`, or what the function `answer` returns for the request's
    parameters. Keeps the parameters of each request."""

    def __init__(self, address, answer):
        super().__init__(daemon=True)
        self.answer, self.requests = answer, []
        self.listener = socket.create_server(address)
        self.start()

    def run(self):
        while True:
            try:
                c, _ = self.listener.accept()
            except OSError:
                return
            with c, c.makefile("rb") as f:
                self.serve(c, f)

    def reply(self, params):
        self.requests.append(params)
        return self.answer(params) if callable(self.answer) else self.answer

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.join()


class FastCGI(Application):
    BEGIN, END, PARAMS, STDIN, STDOUT = 1, 3, 4, 5, 6

    def record(self, kind, data):
        return struct.pack(">BBHHBB", 1, kind, 1, len(data), 0, 0) + data

    def serve(self, c, f):
        kind, params = 0, b""
        while kind != self.STDIN or size:
            _, kind, _, size, padding, _ = struct.unpack(">BBHHBB", f.read(8))
            data = f.read(size + padding)[:size]
            params += data if kind == self.PARAMS else b""
        answer = self.reply(params)
        for i in range(0, len(answer), 65535):
            c.sendall(self.record(self.STDOUT, answer[i:i + 65535]))
        c.sendall(self.record(self.STDOUT, b"") + self.record(self.END, bytes(8)))


class Uwsgi(Application):
    def serve(self, c, f):
        _, size, _ = struct.unpack("<BHB", f.read(4))
        c.sendall(b"HTTP/1.1 200 OK\r\n" + self.reply(f.read(size)))


class Configured(Base):
    conf = CONF.replace("IMAGES", "")

    def application(self, kind, answer, host="127.0.0.6"):
        app = kind((host, 9000 if kind is FastCGI else 9001), answer)
        self.addCleanup(app.close)
        return app

    def raw(self, *answer):
        """An HTTP application that gives these answers, one after the other."""
        answers = iter(answer)
        raw = Raw(lambda q: next(answers), "127.0.0.6")
        self.addCleanup(raw.close)
        return raw

    def body(self, uri, body=BIG, status=200):
        c = Client()
        r = c.get(uri)
        c.close()
        self.assertEqual((r.status, r.body == body), (status, True))
        self.assertClean(r)
        return r

    def outcomes(self, n=1):
        return self.outcome(n=n), self.outcome(8083, n)


class Upstreams(Configured):
    def test_fastcgi_and_uwsgi_bodies_are_relayed_by_the_backend(self):
        for n, (kind, uri) in enumerate([(FastCGI, "/fastcgi/x"), (Uwsgi, "/uwsgi/x")]):
            self.application(kind, b"Content-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(BIG) + BIG)
            self.body(uri)
            self.assertEqual(self.outcomes(n + 1), ("-", "relayed:not_file"))
        self.assertEqual(self.agent.counters()["offers"], 0)

    def test_without_a_length_they_are_relayed(self):
        for n, (kind, uri) in enumerate([(FastCGI, "/fastcgi/x"), (Uwsgi, "/uwsgi/x")]):
            self.application(kind, b"Content-Type: text/plain\r\n\r\n" + TEXT)
            self.body(uri, TEXT)
            self.assertEqual(self.outcomes(n + 1), ("-", "relayed:not_file"))

    def test_fastcgi_cache_stores_first_and_offers_then(self):
        app = self.application(FastCGI, b"Content-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(BIG) + BIG)
        for _ in range(3):
            self.body("/fastcgi-cached/x")
        self.assertEqual(len(app.requests), 1)
        self.assertNotIn(b"SHUNT", app.requests[0])  # no consent: the body is stored here, so it has to come
        self.assertEqual([self.outcomes(n)[0] for n in (1, 2, 3)], ["-", "shortcut", "shortcut"])

    def test_application_gets_the_consent_and_no_more(self):
        app = self.application(FastCGI, b"Content-Type: text/plain\r\n\r\nhello")
        self.body("/fastcgi-here/x", b"hello")
        self.assertRegex(app.requests[0], rb"HTTP_SHUNT_CONSENT1; frontend=self; nonce=[0-9a-f]{32}; to=[0-9a-f]{16}; tiers=1")
        self.assertEqual(app.requests[0].count(b"SHUNT"), 1)

    def test_forged_fields_of_an_application_are_stripped(self):
        for kind, uris in (FastCGI, ("/fastcgi/x", "/fastcgi-here/x")), (Uwsgi, ("/uwsgi/x", "/uwsgi-here/x")):
            self.application(kind, b"Content-Type: text/plain\r\nShunt-Other: 1\r\nSHUNT-consent: 2\r\nX-A: b\r\n\r\nhello")
            for uri in uris:
                self.assertEqual(self.body(uri, b"hello").fields["x-a"], "b")

    def test_forged_offer_of_an_application_is_refused(self):
        offer = f"1; backend=self; offer={7:016x}; length=50000; tag={'0' * 32}".encode()
        for kind, uris in (FastCGI, ("/fastcgi/x", "/fastcgi-here/x")), (Uwsgi, ("/uwsgi/x", "/uwsgi-here/x")):
            self.application(kind, b"Content-Type: text/plain\r\nContent-Length: 0\r\nSet-Cookie: a=b\r\nShunt-Payload: "
                             + offer + b"\r\n\r\n")
            for uri in uris:
                r = Client().get(uri)
                self.assertEqual(r.status, 502)
                self.assertClean(r)
                self.assertNotIn("set-cookie", r.fields)
        self.assertEqual(self.agent.counters()["refused_untrusted"], 8)  # each request was repeated once

    def test_good_offer_of_a_trusted_application_is_taken(self):
        def offer(params):
            nonce = bytes.fromhex(re.search(rb"nonce=([0-9a-f]{32})", params).group(1).decode())
            tag = agents.siphash128(b"K" * 16, nonce + struct.pack("<QQ", 7, 50000))
            value = f"1; backend=self; offer={7:016x}; length=50000; tag={tag.hex()}"
            return f"Content-Type: text/plain\r\nContent-Length: 0\r\nShunt-Payload: {value}\r\n\r\n".encode()
        self.application(FastCGI, offer, "127.0.0.5")
        self.agent.offers[7] = (os.open(self.dir + "/www/big", os.O_RDONLY), 0, 50000, b"")
        self.body("/fastcgi-here-trusted/x", BIG[:50000])
        self.assertEqual(self.outcome(), "shortcut")


class Files(Configured):
    def test_threads_with_sendfile(self):
        for n in 1, 2, 3:
            self.body("/threads/big")
            self.assertEqual(self.outcomes(n), ("shortcut", "offered"))

    def test_threads_without_sendfile(self):
        """The header is held back until the body comes, in parts, from another thread."""
        self.body("/threads-memory/big")
        self.assertEqual(self.outcomes(), ("-", "relayed:not_file"))

    def test_directio(self):
        try:
            os.close(os.open(self.dir + "/www/big", os.O_RDONLY | os.O_DIRECT))
        except OSError:
            self.skipTest(f"the file system of {self.dir} has no O_DIRECT")
        for n, uri in enumerate(["/directio/big", "/directio-threads/big"]):
            self.body(uri)
            self.assertEqual(self.outcomes(n + 1), ("-", "relayed:not_file"))

    def test_several_ranges_and_threads(self):
        r = Client().get("/threads-memory/big", fields="Range: bytes=0-99999,200000-299999\r\n")
        self.assertEqual(r.status, 206)
        self.assertIn(BIG[200000:300000], r.body)


class Workers(Configured):
    workers = 3

    def test_each_offers_and_hands_off(self):
        handoffs, offers = set(), set()
        for n in range(300):
            self.body("/text.html", TEXT)
            h = self.agent.wait("handoff")
            handoffs.add(h["handoff"] >> 64)
            offers.add(h["offer"] >> 32)
            if n >= 30 and len(handoffs) == len(offers) == 3:
                break
        self.assertEqual((len(handoffs), len(offers)), (3, 3))
        self.assertEqual((self.agent.counters()["shortcuts"], self.agent.counters()["offers"]), (n + 1, n + 1))

    def test_concurrent(self):
        bad = []
        def one():
            c = Client()
            for uri, body in [("/big", BIG), ("/text.html", TEXT), ("/threads/big", BIG), ("/empty", b"")] * 3:
                if c.get(uri).body != body:
                    bad.append(uri)
        threads = [threading.Thread(target=one) for _ in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        self.assertEqual((bad, self.agent.counters()["shortcuts"]), ([], 8 * 9))


class Busy(Configured):
    """An agent that reads no offers: its socket becomes full, and later responses are relayed."""

    def request(self):
        c = Client("127.0.0.2", 8083, source="127.0.0.9")
        c.send("/text.html", fields=CONSENT)
        r = c.receive()
        c.close()
        self.assertEqual((r.status, r.body), (200, b"" if "shunt-payload" in r.fields else TEXT))
        return r

    def test_what_does_not_fit_is_relayed(self):
        self.agent.takes_offers.clear()
        offered = 0
        while self.request().body == b"":
            offered += 1
            self.assertLess(offered, 5000, "the socket does not become full")
        self.assertGreater(offered, 0)
        for n in range(3):  # the worker still serves other requests
            self.assertEqual(self.request().body, TEXT)
            self.assertEqual(Client("127.0.0.2", 8083).get("/small").body, b"s" * 100)
        self.assertEqual(self.outcome(8083, offered + 1), "relayed:agent_busy")
        n = self.agent.counters()
        self.assertEqual((n["relayed_agent_busy"], n["offers"]), (4, offered))
        self.agent.takes_offers.set()
        wait_for(lambda: len(self.agent.offers) == offered)
        self.assertEqual(self.request().body, b"")

    def test_through_the_frontend(self):
        self.agent.takes_offers.clear()
        while self.request().body == b"":
            pass
        self.body("/big")
        self.assertEqual(self.outcome(), "-")
        self.agent.takes_offers.set()
        wait_for(lambda: len(self.agent.offers) == self.agent.counters()["offers"])
        self.body("/big")
        self.assertEqual(self.outcome(n=2), "shortcut")


class Pages(Configured):
    """Error pages that are long files, and files that an application names in a header field."""

    def test_error_page_of_the_backend(self):
        self.body("/page/x", status=404)
        self.assertEqual(self.outcomes(), ("-", "-"))
        self.body("/other-status/x")
        self.assertEqual(self.outcomes(2), ("shortcut", "offered"))

    def test_error_page_of_the_backend_for_its_application(self):
        self.raw(*[b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone"] * 2)
        self.body("/intercepted/x", status=404)
        self.body("/app/x", b"gone", 404)
        self.assertEqual(self.agent.counters()["offers"], 0)

    def test_error_page_of_the_frontend(self):
        self.body("/local-page/missing", status=404)
        self.body("/local-page/big")
        self.assertEqual([self.outcome(n=n) for n in (1, 2)], ["-", "shortcut"])

    def test_error_page_of_the_frontend_from_the_backend(self):
        self.body("/next-page/missing")
        self.assertEqual((self.outcome(), self.outcome(8083, 2)), ("shortcut", "offered"))

    def test_intercepted_errors(self):
        os.mkdir(self.dir + "/www/dir")
        for uri, status, body in ("big", 200, BIG), ("dir/", 403, TEXT), ("missing", 404, TEXT), ("text.html", 200, TEXT):
            self.body("/intercept/" + uri, body, status)
        self.assertEqual(self.agent.counters()["shortcuts"], 2)

    def test_x_accel_redirect_to_a_file_of_the_backend(self):
        self.raw(*[b"HTTP/1.1 200 OK\r\nX-Accel-Redirect: /protected/big\r\nX-A: b\r\nContent-Length: 0\r\n\r\n"] * 2)
        for n in 1, 2:
            self.body("/app/x")
            self.assertEqual(self.outcomes(n), ("shortcut", "offered"))
        self.assertEqual(Client().get("/protected/big").status, 404)

    def test_x_accel_redirect_by_fastcgi(self):
        self.application(FastCGI, b"X-Accel-Redirect: /protected/big\r\n\r\n")
        self.body("/fastcgi/x")
        self.assertEqual(self.outcomes(), ("shortcut", "offered"))

    def test_x_accel_redirect_at_the_frontend(self):
        self.application(FastCGI, b"X-Accel-Redirect: /static/big\r\n\r\n")
        self.body("/fastcgi-here/x")
        self.assertEqual(self.agent.counters()["offers"], 0)


def modules():
    """Directory of nginx's own dynamic modules; MODULES in the environment overrides it."""
    text = subprocess.run(["nginx", "-V"], stderr=subprocess.PIPE, text=True).stderr
    found = re.search(r"--modules-path=(\S+)", text)
    return os.environ.get("MODULES") or (found.group(1) if found else "/usr/lib/nginx/modules")


IMAGE_FILTER = modules() + "/ngx_http_image_filter_module.so"


def png(width, height):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    rows = b"".join(b"\0" + BIG[i * width * 3:(i + 1) * width * 3] for i in range(height))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


@unittest.skipUnless(os.path.exists(IMAGE_FILTER), f"{IMAGE_FILTER} is not there (libnginx-mod-http-image-filter)")
class Images(Configured):
    module = f"{IMAGE_FILTER}; load_module {Base.module}"
    conf = CONF.replace("IMAGES", """
        location /resized/ {{ image_filter resize 100 -; proxy_pass http://127.0.0.2:8083/; }}
        location /tested/ {{ image_filter test; proxy_pass http://127.0.0.2:8083/; }}
        location /size/ {{ image_filter size; proxy_pass http://127.0.0.2:8083/; }}""")

    def setUp(self):
        super().setUp()
        self.image = png(300, 300)
        with open(self.dir + "/www/x.png", "wb") as f:
            f.write(self.image)

    def test_filter_gets_the_body(self):
        r = Client().get("/resized/x.png")
        self.assertEqual((r.status, struct.unpack(">II", r.body[16:24])), (200, (100, 100)))
        self.assertEqual(self.outcome(), "fetched:filter")
        self.body("/tested/x.png", self.image)
        self.assertIn(b'"width": 300', Client().get("/size/x.png").body)

    def test_without_the_filter(self):
        self.body("/x.png", self.image)
        self.assertEqual(self.outcome(), "shortcut")


class Replaced(Configured):
    """Responses with which nginx replaces an upstream's, or to which filters add something."""
    conf = Configured.conf.replace("location /static/", """location /next-page-404/ {{
            proxy_pass http://127.0.0.2:8083/; proxy_intercept_errors on; error_page 404 /big;
        }}
        location /added/ {{ add_after_body /static/small; proxy_pass http://127.0.0.2:8083/; }}
        location /slice/ {{
            slice 100k; proxy_set_header Range $slice_range; proxy_set_header Connection ""; proxy_pass http://127.0.0.2:8083/;
        }}
        location /static/""")

    def test_error_page_with_its_own_status(self):
        self.body("/next-page-404/missing", status=404)

    def test_addition(self):
        self.body("/added/text.html", TEXT + b"s" * 100)

    def test_slices(self):
        self.body("/slice/big")

    def test_range_as_long_as_a_slice(self):
        r = Client().get("/slice/big", fields="Range: bytes=50-102449\r\n")
        self.assertEqual((r.status, r.body == BIG[50:102450]), (206, True))


class ReplacedImages(Images):
    conf = Images.conf.replace("location /resized/", """location /tested-page/ {{
            error_page 415 =200 /static/big; image_filter test; proxy_pass http://127.0.0.2:8083/;
        }}
        location /resized/""")

    def test_no_image(self):
        # The image filter refuses the first response by the length in its header, and the second one by its contents.
        for uri in "/tested/big", "/tested/text.html":
            self.assertEqual(Client().get(uri).status, 415)

    def test_no_image_with_a_page(self):
        for uri in "/tested-page/big", "/tested-page/text.html":
            self.body(uri)
