#!/usr/bin/env python3
"""Tests of the nginx module against a small agent (agent.py), as root, in one network namespace. A handoff lets a
backend send a body on the client's own connection; an offer is a body that a backend holds ready. A fetch brings such a
body through the agents instead. A consent is the request's header field by which a frontend permits an offer.

agent.py stands in for shuntd: it speaks the protocol between the agent and nginx. More tests are in other files:

  again.py            offers that cannot be used
  board.py            what nginx reads of the agent's peers in the memory that the two share (the board)
  configurations.py   the module together with other modules and directives of nginx
  endings.py          handoffs whose client, worker or agent goes away
  header.py           response headers that have no room for an offer
  late.py             fetches that fail after the response's header was sent
  lifetime.py         which bodies may be the first shortcut of a connection
  limits.py           limits that the agent sets in shared memory, handoffs that it counts there, trace ids
  plain.py            tiers without Shunt
  recovery.py         handoffs that another backend continues
  stalled.py          handoffs without progress though nothing is stopped
  stopped.py          an agent that is stopped, or refuses
  tls.py              TLS connections

Tiers are addresses of the loopback: the client 127.0.0.1, the backend 127.0.0.2:8083, the intermediate 127.0.0.3:8082,
the frontends 127.0.0.4:8081 and up. A tier connects to the next one from 127.0.0.9.
"""
import gzip, os, re, resource, shutil, signal, socket, struct, subprocess, sys, tempfile, threading, time, unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import agent as agents
import consents
from confined import own_network
from consents import consent as good_consent
from wait import PATIENCE, wait_for

MODULE = os.path.join(HERE, "../build/ngx_http_shunt_module.so")
SHIM = os.path.join(HERE, "build/kernel_shim.so")
BIG = os.urandom(3 * 1024 * 1024 + 17)
TEXT = (b"<p>needle in a haystack</p>\n" * 8000)
RST = struct.pack("ii", 1, 0)

# Beginning of every nginx configuration in these tests.
HEAD = """
load_module {module};
user root; worker_processes {workers}; pid {dir}/pid; error_log {dir}/error.log {level};
events {{ worker_connections 512; }}
http {{
    shunt_agent {dir}/shuntd.sock;
    log_format t '$server_port $request_uri $status $shunt $shunt_bytes $body_bytes_sent "$http_shunt_consent"';
    access_log {dir}/access.log t;
    client_body_temp_path {dir}/a; proxy_temp_path {dir}/b; fastcgi_temp_path {dir}/c;
    uwsgi_temp_path {dir}/d; scgi_temp_path {dir}/e;
    default_type application/octet-stream; types {{ text/html html; image/png png; }}
    sendfile on; send_timeout {send_timeout}; keepalive_timeout 10;
    proxy_bind 127.0.0.9; proxy_http_version 1.1; proxy_set_header Connection "";
"""

CONF = HEAD + """
    proxy_cache_path {dir}/cache keys_zone=z:1m;
    limit_conn_zone $server_addr zone=conn:64k;
    upstream backend {{ server 127.0.0.2:8083; keepalive 8; }}
    upstream inter {{ server 127.0.0.3:8082; keepalive 8; }}

    server {{ # backend
        listen 127.0.0.2:8083; root {dir}/www; shunt_trust 127.0.0.9; shunt_offer on; charset off;
        location /conn/ {{ limit_conn conn 9; alias {dir}/www/; }}
        location /etagless/ {{ alias {dir}/www/; etag off; }}
        location /types/ {{ alias {dir}/www/; shunt_offer_types text/html; }}
        location /cachehit/ {{ proxy_cache z; proxy_cache_valid 200 1m; proxy_pass http://127.0.0.2:8083/; }}
        location /mem/ {{ sendfile off; alias {dir}/www/; }}
        location /limited/ {{ add_header X-Accel-Limit-Rate 5000000; alias {dir}/www/; }}
        location /redirect/ {{ add_header X-Accel-Redirect /internal/big; return 200; }}
    }}
    server {{ # intermediate
        listen 127.0.0.3:8082; shunt_trust 127.0.0.9 127.0.0.2;
        location / {{ proxy_pass http://backend; }}
        location /no/ {{ shunt_consent off; proxy_pass http://backend/; }}
        location /cached/ {{ proxy_cache z; proxy_cache_valid 200 1m; proxy_pass http://backend/; }}
    }}
    server {{ # frontend
        listen 127.0.0.4:8081; shunt_trust 127.0.0.2 127.0.0.3 127.0.0.5; shunt on;
        error_page 502 /oops; location = /oops {{ internal; return 200 "oops page"; }}
        location / {{ proxy_pass http://backend; }}
        location /via/ {{ proxy_pass http://inter/; }}
        location /unbuffered/ {{ proxy_buffering off; proxy_pass http://backend/; }}
        location /sub/ {{ sub_filter needle thread; sub_filter_once off; proxy_pass http://backend/; }}
        location /gzip/ {{ gzip on; gzip_proxied any; proxy_pass http://backend/; }}
        location /cached/ {{ proxy_cache z; proxy_cache_valid 200 1m; proxy_pass http://backend/; }}
        location /after/ {{ limit_rate_after 1m; proxy_pass http://backend/; }}
        location /rate/ {{ limit_rate 5m; proxy_pass http://backend/; }}
        location /off/ {{ shunt off; proxy_pass http://backend/; }}
        location /alone0/ {{ shunt_alone_length 0; proxy_pass http://backend/; }}
        location /deaf/ {{ proxy_ignore_client_abort on; proxy_pass http://backend/; }}
        location /digest/ {{ shunt_recover digest; proxy_pass http://backend/; }}
        location /nobody/ {{ shunt_recover off; proxy_pass http://backend/; }}
        location /raw/ {{ proxy_pass http://127.0.0.5:8085/; }}
        location /rawoff/ {{ shunt off; proxy_pass http://127.0.0.5:8085/; }}
        location /strange/ {{ proxy_pass http://127.0.0.6:8085/; }}
        location /static/ {{ alias {dir}/www/; }}
        location /mirror/ {{ mirror /copy; proxy_pass http://backend/; }}
        location = /copy {{ internal; proxy_pass http://127.0.0.5:8085/copy; }}
        location /redirect/ {{ proxy_pass http://backend; }}
        location /internal/ {{ shunt off; internal; proxy_pass http://backend/; }}
    }}
    server {{ # frontend behind realip
        listen 127.0.0.4:8086; shunt_trust 127.0.0.2; shunt on; set_real_ip_from 127.0.0.1;
        location / {{ proxy_pass http://backend; }}
    }}
}}
"""


def read(path):
    with open(path) as f:
        return f.read()


class Response:
    def __init__(self, status, fields, body):
        self.status, self.fields, self.body = status, fields, body


class Client:
    """One connection, with HTTP/1.1 by hand, so that truncation and resets are visible."""

    def __init__(self, host="127.0.0.4", port=8081, timeout=PATIENCE, rcvbuf=0, source=None):
        self.s = socket.socket()
        if rcvbuf:
            self.s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        self.s.settimeout(timeout)
        if source:
            self.s.bind((source, 0))
        self.s.connect((host, port))
        self.f = self.s.makefile("rb")

    def send(self, uri, method="GET", fields=""):
        self.s.sendall(f"{method} {uri} HTTP/1.1\r\nHost: t\r\n{fields}\r\n".encode())

    def head(self):
        line = self.f.readline()
        if not line:
            raise ConnectionError("closed")
        status = int(line.split()[1])
        fields = {}
        while (line := self.f.readline()) not in (b"\r\n", b""):
            k, v = line.decode().rstrip().split(": ", 1)
            fields.setdefault(k.lower(), v)
        return status, fields

    def receive(self, head=False):
        status, fields = self.head()
        if head:
            return Response(status, fields, b"")
        if fields.get("transfer-encoding") == "chunked":
            body = b""
            while n := int(self.f.readline(), 16):
                body += self.f.read(n)
                self.f.readline()
            self.f.readline()
        else:
            n = int(fields["content-length"])
            body = self.f.read(n)
            if len(body) != n:
                raise ConnectionError(f"short: {len(body)} of {n}")
        return Response(status, fields, body)

    def get(self, uri, method="GET", fields=""):
        self.send(uri, method, fields)
        return self.receive(method == "HEAD")

    def close(self):
        self.f.close()
        self.s.close()

    def reset(self):
        self.s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST)
        self.close()


class Base(unittest.TestCase):
    shim = True
    agent_options = {}
    send_timeout = "60s"
    start_agent = True
    conf, workers, module = CONF, 1, MODULE
    meant = "\n"  # text of the serious log lines that a test expects; "\n" is in no line

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="shunt-nginx-")
        os.chmod(self.dir, 0o755)
        os.makedirs(self.dir + "/www")
        for name, data in ("big", BIG), ("text.html", TEXT), ("small", b"s" * 100), ("empty", b""):
            with open(f"{self.dir}/www/{name}", "wb") as f:
                f.write(data)
        self.prepare()
        self.agent = agents.Agent(self.dir, **self.agent_options) if self.start_agent else None
        with open(self.dir + "/conf", "w") as f:
            f.write(self.conf.format(module=self.module, dir=self.dir, send_timeout=self.send_timeout,
                                     workers=self.workers, level=os.environ.get("LEVEL", "info")))
        env = dict(os.environ)
        if self.shim:
            env.update(LD_PRELOAD=SHIM, SHUNT_SHIM=self.dir + "/shim.sock")
        wrapper = os.environ.get("WRAPPER", "").split()
        self.nginx = subprocess.Popen(wrapper + ["nginx", "-c", self.dir + "/conf", "-g", "daemon off;"], env=env)
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.2", 8083)).close()
                break
            except OSError:
                time.sleep(0.05)
        if self.agent:
            wait_for(lambda: self.agent.workers >= 2 * self.workers)

    def prepare(self):
        """Makes files and servers that the configuration names, before nginx starts. Tests override it."""

    def tearDown(self):
        self.nginx.send_signal(signal.SIGQUIT)
        try:
            self.nginx.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.nginx.terminate()
            self.nginx.wait()
            self.fail("nginx does not quit")
        finally:
            if self.agent:
                self.agent.close()
            log = read(self.dir + "/error.log")
        bad = [l for l in log.splitlines() if re.search(r"\[(alert|crit|emerg)\]|signal 11|signal 6|ERROR SUMMARY: [1-9]", l)]
        self.assertEqual([l for l in bad if self.meant not in l], [])
        if not os.environ.get("KEEP"):
            shutil.rmtree(self.dir)

    def whole_for_many(self, uri, body, clients=20):
        bad = []
        def one():
            if Client(timeout=30).get(uri).body != body:
                bad.append(1)
        threads = [threading.Thread(target=one) for _ in range(clients)]
        [t.start() for t in threads]; [t.join() for t in threads]
        self.assertEqual(bad, [])

    def log(self, port=8081, n=1):
        def lines():
            return [l.split(" ") for l in read(self.dir + "/access.log").splitlines() if l.startswith(str(port))]
        wait_for(lambda: len(lines()) >= n)
        return lines()[n - 1]

    def outcome(self, port=8081, n=1):
        return self.log(port, n)[3]

    def consent(self, port=8083, n=1):
        """Returns the consent that came with the n-th request to a port, as the access log has it."""
        return " ".join(self.log(port, n)[6:]).strip('"')

    def assertClean(self, r):
        self.assertEqual([k for k in r.fields if k.startswith("shunt") or k.startswith("x-accel")], [])


class Raw(threading.Thread):
    """An upstream whose answers a test chooses: answer(request) returns the bytes."""

    def __init__(self, answer, host="127.0.0.5"):
        super().__init__(daemon=True)
        self.answer, self.requests, self.closed = answer, [], False
        self.s = socket.create_server((host, 8085))
        self.start()

    def run(self):
        while True:
            try:
                c, _ = self.s.accept()
            except OSError:
                return
            data = b""
            while b"\r\n\r\n" not in data:
                data += c.recv(65536)
            if self.closed:
                return
            self.requests.append(data.decode())
            self.serve(c, data.decode())

    def serve(self, c, request):
        try:
            c.sendall(self.answer(request))
        except OSError:  # nginx has closed the connection
            pass
        c.close()

    def close(self):
        self.s.shutdown(socket.SHUT_RDWR)
        self.s.close()
        self.join()


def field(request, name):
    m = re.search(rf"^{name}: (.*)\r$", request, re.M | re.I)
    return m and m.group(1)


class SeveralRequests:
    """Tests of several requests, for plain connections and for TLS."""
    client, crowd = Client, (16, 10)  # number of clients at the same time, requests of each

    def test_pipelining(self):
        c = self.client()
        for uri in "/big", "/small", "/big", "/text.html":
            c.send(uri)
        for body in BIG, b"s" * 100, BIG, TEXT:
            self.assertEqual(c.receive().body, body)

    def test_concurrent(self):
        clients, requests = self.crowd
        bad = []
        def one():
            c = self.client()
            for _ in range(requests):
                if c.get("/text.html").body != TEXT:
                    bad.append(1)
        threads = [threading.Thread(target=one) for _ in range(clients)]
        [t.start() for t in threads]; [t.join() for t in threads]
        self.assertEqual((bad, self.agent.counters()["shortcuts"]), ([], clients * requests))


class Unproven(Base):
    """The kernel finds no proof that a client's packets pass the steering programs (BPF). A handoff needs this
    proof."""

    def test_is_fetched_says_so_and_is_tried_again(self):
        refusals = iter([agents.UNPROVEN, 0])
        self.agent.refusal = lambda handoff: next(refusals)
        c = Client()
        for outcome in "fetched:unproven", "shortcut":
            self.assertEqual(c.get("/big").body, BIG)
            n = 1 if outcome != "shortcut" else 2
            self.assertEqual(self.log(n=n)[2:6], ["200", outcome, str(len(BIG)), str(len(BIG))])
        n = self.agent.counters()
        self.assertEqual((n["fetched_unproven"], n["fetched_begin"], n["shortcuts"]), (1, 0, 1))
        self.assertEqual(self.agent.handoffs(), 0)

    def told(self):
        return [l for l in read(self.dir + "/error.log").splitlines() if "add the interface to shuntd.toml" in l]

    def test_where_it_is_the_rule_the_log_says_once_what_to_do(self):
        self.agent.refusal = lambda handoff: agents.UNPROVEN
        c = Client()
        for _ in range(8):
            self.assertEqual(c.get("/text.html").body, TEXT)
        told = self.told()
        self.assertEqual(len(told), 1, told)
        self.assertIn("[error]", told[0])

    def get_once(self, times):
        for _ in range(times):
            c = Client()
            self.assertEqual(c.get("/text.html").body, TEXT)
            c.close()

    def test_the_log_says_so_when_four_connections_of_one_response_have_none(self):
        self.agent.refusal = lambda handoff: agents.UNPROVEN
        self.get_once(3)
        self.assertEqual(self.told(), [])
        self.get_once(1)  # the location stops giving consents
        self.assertEqual(len(self.told()), 1)
        self.get_once(20)
        self.assertEqual(len(self.told()), 1, "once")

    def test_a_shortcut_in_between_begins_the_row_again(self):
        refusals = iter([agents.UNPROVEN] * 3 + [0] + [agents.UNPROVEN] * 3)
        self.agent.refusal = lambda handoff: next(refusals)
        wait_for(lambda: self.get_once(1) or self.agent.counters()["fetched_unproven"] == 6)
        self.assertEqual(next(refusals, None), None)
        self.assertEqual(self.told(), [])

    def test_connections_that_are_older_than_the_programs_are_an_accident(self):
        self.agent.close()
        wait_for(lambda: "lost the agent" in read(self.dir + "/error.log"))
        clients = [Client() for _ in range(20)]
        for c in clients:
            self.assertEqual(c.get("/small").body, b"s" * 100)
        self.agent = agents.Agent(self.dir)
        wait_for(lambda: self.agent.workers >= 2)
        self.agent.refusal = lambda handoff: agents.UNPROVEN
        for c in clients:
            self.assertEqual(c.get("/text.html").body, TEXT)
        self.assertGreaterEqual(self.agent.counters()["fetched_unproven"], 4)
        self.assertEqual(self.told(), [])

    def test_all_listeners_of_http_are_watched_when_an_agent_comes(self):
        watched = {self.agent.wait("watch") for _ in range(4)}
        self.assertEqual(watched, {("127.0.0.2", 8083), ("127.0.0.3", 8082), ("127.0.0.4", 8081), ("127.0.0.4", 8086)})


class Shortcut(SeveralRequests, Base):
    def test_body_is_equal_and_logged(self):
        c = Client()
        r = c.get("/big")
        self.assertEqual((r.status, r.body == BIG), (200, True))
        self.assertClean(r)
        self.assertEqual(r.fields["content-length"], str(len(BIG)))
        self.assertEqual(self.log()[2:6], ["200", "shortcut", str(len(BIG)), str(len(BIG))])
        backend = self.log(8083)
        self.assertEqual(backend[2:6], ["200", "offered", str(len(BIG)), "0"])
        h = self.agent.wait("handoff")
        self.assertEqual((h["first"], h["length"], h["rate"], h["peer"]), (1, len(BIG), 0, 0))
        self.assertEqual(h["client_address"][12:], b"\x7f\0\0\1")
        self.assertEqual(h["server_address"][10:], b"\xff\xff\x7f\0\0\4")
        self.assertEqual(struct.unpack(">H", h["server_port"])[0], 8081)
        self.assertEqual(struct.unpack(">H", h["client_port"])[0], c.s.getsockname()[1])
        self.assertTrue(h["options"] & 1 and h["tsval"] and h["snd_wnd"] > 1000 and h["mss"] > 500)

    def test_keepalive_and_counters(self):
        c = Client()
        for i in range(5):
            self.assertEqual(c.get("/big").body, BIG)
            self.assertEqual(c.get("/small").body, b"s" * 100)
            self.assertEqual(c.get("/text.html").body, TEXT)
        wait_for(lambda: self.agent.counters()["shortcut_bytes"] == 5 * (len(BIG) + len(TEXT)))
        n = self.agent.counters()
        self.assertEqual((n["shortcuts"], n["offers"], n["relayed_too_small"]), (10, 10, 5))
        self.assertEqual([self.agent.wait("handoff")["first"] for _ in range(10)], [1] + [0] * 9)

    def test_http_1_0_and_connection_close(self):
        c = Client()
        c.s.sendall(b"GET /big HTTP/1.0\r\n\r\n")
        self.assertEqual(c.receive().body, BIG)
        self.assertEqual(c.s.recv(1), b"")
        self.assertEqual(self.outcome(), "shortcut")

    def test_intermediate(self):
        r = Client().get("/via/big")
        self.assertEqual(r.body, BIG)
        self.assertClean(r)
        self.assertEqual((self.outcome(), self.log(8082)[5]), ("shortcut", "0"))

    def test_intermediate_that_does_not_consent(self):
        self.assertEqual(Client().get("/via/no/big").body, BIG)
        self.assertEqual((self.outcome(), self.outcome(8083)), ("-", "relayed:no_consent"))

    def test_caching_intermediate_keeps_its_cache(self):
        for _ in range(2):
            self.assertEqual(Client().get("/via/cached/big").body, BIG)
        self.assertEqual(self.outcome(8082), "relayed:cache")
        self.assertEqual(self.agent.counters()["offers"], 0)

    def test_answer_out_of_a_cache_is_offered(self):
        c = Client()
        for _ in range(3):
            self.assertEqual(c.get("/cachehit/big").body, BIG)
        self.assertEqual(self.outcome(n=3), "shortcut")
        self.assertEqual(c.get("/cachehit/big", fields="Range: bytes=5-200004\r\n").body, BIG[5:200005])
        self.assertEqual(self.outcome(n=4), "shortcut")
        # The first offers are bodies in files of the cache, in which nginx may rewrite the header before the body. The
        # last offer is an ordinary file.
        self.assertEqual(c.get("/big").body, BIG)
        wait_for(lambda: len(self.agent.flags) >= 3)
        self.assertEqual(set(self.agent.flags[:-1]) | {self.agent.flags[-1] + 2}, {agents.OFFER_BODY, 2})

    def test_without_sendfile_it_is_relayed(self):
        self.assertEqual(Client().get("/mem/big").body, BIG)
        self.assertEqual(self.outcome(8083), "relayed:not_file")

    def test_range(self):
        r = Client().get("/big", fields="Range: bytes=1000-200999\r\n")
        self.assertEqual((r.status, r.body == BIG[1000:201000]), (206, True))
        self.assertEqual(r.fields["content-range"], f"bytes 1000-200999/{len(BIG)}")
        self.assertEqual(self.outcome(), "shortcut")

    def test_several_ranges_are_relayed(self):
        r = Client().get("/big", fields="Range: bytes=0-99999,200000-299999\r\n")
        self.assertEqual(r.status, 206)
        self.assertIn(BIG[200000:300000], r.body)
        self.assertEqual(self.outcome(8083), "relayed:not_file")

    def test_head_not_modified_and_empty(self):
        c = Client()
        r = c.get("/big", "HEAD")
        self.assertEqual(r.fields["content-length"], str(len(BIG)))
        etag = r.fields["etag"]
        self.assertEqual(c.get("/big", "HEAD", f"If-None-Match: {etag}\r\n").status, 304)
        self.assertEqual(c.get("/empty").body, b"")
        self.assertEqual(c.get("/big").fields["etag"], etag)

    def test_unbuffered(self):
        self.assertEqual(Client().get("/unbuffered/big").body, BIG)
        self.assertEqual(self.outcome(), "shortcut")

    def test_limit_rate_goes_with_the_handoff(self):
        self.assertEqual(Client().get("/rate/text.html").body, TEXT)
        self.assertEqual(self.agent.wait("handoff")["rate"], 5 << 20)

    def test_x_accel_limit_rate_of_the_backend_goes_with_it_too(self):
        self.assertEqual(Client().get("/limited/text.html").body, TEXT)
        self.assertEqual(self.agent.wait("handoff")["rate"], 5_000_000)

    def test_realip_does_not_change_the_connection(self):
        c = Client(port=8086)
        self.assertEqual(c.get("/big", fields="X-Real-IP: 9.9.9.9\r\n").body, BIG)
        self.assertEqual(self.agent.wait("handoff")["client_address"][12:], b"\x7f\0\0\1")

    def test_reasons_to_relay(self):
        c = Client()
        for i, (uri, why) in enumerate([("/after/big", "relayed:limit_rate_after"), ("/cached/big", "relayed:cache"),
                                        ("/off/big", "-"), ("/static/big", "relayed:no_consent")]):
            self.assertEqual(c.get(uri).body, BIG)
            if uri != "/static/big":
                self.assertEqual(self.outcome(n=i + 1), why)
        self.assertEqual(c.get("/types/big").body, BIG)
        self.assertEqual(c.get("/types/text.html").body, TEXT)
        self.assertEqual(self.agent.counters()["relayed_type"], 1)
        self.assertEqual(c.get("/conn/big").body, BIG)
        self.assertEqual(self.agent.counters()["relayed_limit_rate"], 1)

    def test_x_accel_redirect_leaves_no_consent(self):
        self.assertEqual(Client().get("/redirect/x").body, BIG)
        self.assertEqual(self.agent.counters()["offers"], 0)

    def test_mirror_gets_no_consent(self):
        raw = Raw(lambda q: b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        self.assertEqual(Client().get("/mirror/big").body, BIG)
        wait_for(lambda: raw.requests)
        raw.close()
        self.assertIsNone(field(raw.requests[0], "Shunt-Consent"))
        self.assertEqual(self.agent.counters()["shortcuts"], 1)

    def test_reload_and_quit_during_a_handoff(self):
        go = threading.Event()
        self.agent.on_handoff = lambda s, h: (go.wait(PATIENCE), self.agent.serve(s, h))
        c = Client()
        c.send("/big")
        self.agent.wait("handoff")
        self.nginx.send_signal(signal.SIGHUP)
        wait_for(lambda: self.agent.workers >= 4)
        time.sleep(0.3)
        go.set()
        self.assertEqual(c.receive().body, BIG)
        self.assertEqual(Client().get("/big").body, BIG)


class Filters(Base):
    def test_sub_filter_gets_the_body(self):
        r = Client().get("/sub/text.html")
        self.assertEqual(r.body, TEXT.replace(b"needle", b"thread"))
        self.assertEqual(self.outcome(), "fetched:filter")

    def test_gzip_gets_the_body(self):
        c = Client()
        for _ in range(2):
            r = c.get("/gzip/text.html", fields="Accept-Encoding: gzip\r\n")
            self.assertEqual(gzip.decompress(r.body), TEXT)
        self.assertEqual(self.outcome(), "fetched:filter")

    def test_fetch_that_fails_costs_no_response(self):
        self.agent.on_fetch = lambda s, id, offer, length: self.agent.end(s, id, 2)
        c = Client()
        self.assertEqual(gzip.decompress(c.get("/gzip/text.html", fields="Accept-Encoding: gzip\r\n").body), TEXT)
        self.assertEqual(c.get("/sub/text.html").body, TEXT.replace(b"needle", b"thread"))
        self.assertEqual(c.get("/big").body, BIG)
        n = self.agent.counters()
        self.assertEqual((n["fetch_failed"], n["asked_again"], n["shortcuts"]), (2, 2, 1))
        self.assertEqual(self.log(8081, 1)[2:4], ["200", "fetched:filter"])

    def test_fetch_cut_short_ends_without_its_last_chunk(self):
        self.agent.on_fetch = lambda *a: self.agent.serve_fetch(*a, part=0.5)
        c = Client()
        c.send("/sub/text.html")
        self.assertEqual(c.head()[1].get("transfer-encoding"), "chunked")
        body = c.f.read()
        self.assertGreater(len(body), 1000)
        self.assertNotIn(b"\r\n0\r\n", body)

    def test_fetch_cut_short_resets_where_the_end_of_the_connection_would_be_the_end_of_the_body(self):
        self.agent.on_fetch = lambda *a: self.agent.serve_fetch(*a, part=0.5)
        c = Client()
        c.s.sendall(b"GET /sub/text.html HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        self.assertNotIn("content-length", c.head()[1])
        with self.assertRaises(ConnectionResetError):
            c.f.read()

    def test_agent_lost_during_a_fetch(self):
        self.agent.on_fetch = lambda s, *a: s.shutdown(socket.SHUT_RDWR)
        self.assertEqual(Client().get("/sub/text.html").body, TEXT.replace(b"needle", b"thread"))


class Trouble(Base):
    def test_agent_ends_the_handoff(self):
        def half(s, h):
            c = self.agent.client_socket(h["handoff"])
            self.agent.write(c, self.agent.payload(h["offer"], 0.1))
            c.close()
            self.agent.end(s, h["handoff"], 5)
        self.agent.on_handoff = half
        with self.assertRaises(ConnectionResetError):
            Client().get("/big")
        self.agent.wait("cancel")
        self.agent.wait("abort")
        self.assertEqual(self.agent.counters()["aborted"], 1)
        self.assertEqual(self.outcome(), "shortcut")
        self.agent.on_handoff = self.agent.serve
        self.assertEqual(Client().get("/big").body, BIG)

    def test_a_stranger_cannot_end_a_handoff(self):
        self.agent.on_handoff = lambda s, h: (self.agent.end(s, h["handoff"], 5, peer=7), self.agent.serve(s, h))
        c = Client()
        self.assertEqual(c.get("/big").body, BIG)
        self.assertEqual(self.outcome(), "shortcut")
        self.assertEqual(self.agent.counters()["aborted"], 0)
        self.agent.on_handoff = lambda s, h: self.agent.end(s, h["handoff"], 5, peer=h["peer"])
        with self.assertRaises(ConnectionResetError):
            Client().get("/big")

    def test_reset_event(self):
        self.agent.on_handoff = lambda s, h: self.agent.ring.post(h["handoff"], 0, agents.RESET)
        with self.assertRaises(ConnectionResetError):
            Client().get("/big")
        self.agent.wait("abort")

    def test_client_closes(self):
        self.agent.on_handoff = lambda s, h: None
        for end in Client.close, Client.reset:
            c = Client()
            c.send("/big")
            h = self.agent.wait("handoff")
            end(c)
            self.assertEqual(self.agent.wait("abort"), h["handoff"])
            self.agent.ring.post(h["handoff"], len(BIG), agents.COMPLETE)  # too late: there is no handoff now
        self.assertEqual(self.agent.counters()["aborted"], 2)

    def test_client_closes_its_half(self):
        for uri, whole in ("/big", False), ("/deaf/big", True):
            closed = threading.Event()
            self.agent.on_handoff = lambda s, h: (closed.wait(PATIENCE), self.agent.serve(s, h))
            c = Client()
            c.send(uri)
            self.agent.wait("handoff")
            c.s.shutdown(socket.SHUT_WR)
            if whole:
                time.sleep(0.2)  # for nginx to see the FIN
                closed.set()
                self.assertEqual(c.receive().body, BIG)
                self.assertEqual(c.f.read(1), b"")
            else:
                self.agent.wait("abort")
                closed.set()
        self.assertEqual(self.agent.counters()["aborted"], 1)

    def test_unknown_events_and_ends(self):
        self.agent.on_handoff = lambda s, h: (self.agent.ring.post(12345, 1, 1), self.agent.ring.post(MASK64, 1, 2),
                                              self.agent.end(s, 99, 1), self.agent.serve(s, h))
        self.assertEqual(Client().get("/big").body, BIG)

    def test_agent_goes_and_comes_back(self):
        go = threading.Event()
        self.agent.on_handoff = lambda s, h: (go.wait(PATIENCE), self.agent.serve(s, h))
        c = Client()
        c.send("/big")
        self.agent.wait("handoff")
        old = self.agent
        old.close()
        wait_for(lambda: "lost the agent" in read(self.dir + "/error.log"))
        self.assertEqual(Client().get("/big").body, BIG)
        self.assertEqual(self.outcome(), "relayed:no_agent")
        # The worker tries often, but logs this only once at a level that is shown by default.
        lines = lambda level: [l for l in read(self.dir + "/error.log").splitlines() if "no agent at" in l and level in l]
        wait_for(lambda: lines("[info]"))
        self.assertEqual(len(lines("[error]")), 1, lines(""))
        self.assertIn(f'"{old.path}"', lines("[error]")[0])
        go.set()
        self.assertEqual(c.receive().body, BIG)  # the handoff in progress has completed
        self.agent = agents.Agent(self.dir)
        wait_for(lambda: self.agent.workers >= 2)
        self.assertEqual(c.get("/big").body, BIG)
        self.assertEqual(self.agent.counters()["shortcuts"], 1)


MASK64 = (1 << 64) - 1


class Stall(Base):
    send_timeout = "1s"

    def test_client_without_progress_is_timed_out(self):
        self.agent.on_handoff = lambda s, h: None
        c = Client()
        t = time.time()
        c.send("/big")
        c.head()
        with self.assertRaises(ConnectionResetError):
            c.s.recv(1)
        self.assertTrue(0.9 < time.time() - t < 30)  # busy machines need time; nginx's default would be 60 s


class LongStall(Base):
    send_timeout = "5s"

    def test_slow_progress_is_enough(self):
        def slow(s, h):
            c = self.agent.client_socket(h["handoff"])
            data = self.agent.payload(h["offer"])
            for i in range(12):  # longer than the timeout in all
                self.agent.write(c, data[i * len(data) // 12:(i + 1) * len(data) // 12])
                time.sleep(0.5)
            agents.wait_acked(c.fileno())
            self.agent.ring.post(h["handoff"], len(data), 1)
            c.close()
        self.agent.on_handoff = slow
        self.assertEqual(Client().get("/text.html").body, TEXT)

    def test_lost_completion_is_found(self):
        def silent(s, h):
            c = self.agent.client_socket(h["handoff"])
            self.agent.write(c, self.agent.payload(h["offer"]))
            c.close()
        # kernel_shim.c never reports that a region is complete, so this test checks only that nothing hangs.
        self.agent.on_handoff = silent
        c = Client()
        r = c.get("/text.html")
        self.assertEqual(r.body, TEXT)
        with self.assertRaises(ConnectionError):
            c.get("/small")


class Fetch(Base):
    """Fetches without steering programs (BPF): SHUNT_BEGIN fails with ENOPROTOOPT, and each offered body is fetched
    after its header has left."""
    shim = False

    def test_body(self):
        c = Client()
        for _ in range(3):
            self.assertEqual(c.get("/big").body, BIG)
        self.assertEqual(self.log()[2:6], ["200", "fetched:begin", str(len(BIG)), str(len(BIG))])

    def test_pipelining_and_unbuffered(self):
        c = Client()
        for uri in "/big", "/unbuffered/big", "/small", "/via/text.html":
            c.send(uri)
        for body in BIG, BIG, b"s" * 100, TEXT:
            self.assertEqual(c.receive().body, body)

    def test_slow_client(self):
        c = Client(rcvbuf=8192)
        c.send("/big")
        status, fields = c.head()
        body = b""
        while len(body) < len(BIG):
            body += c.f.read(min(100000, len(BIG) - len(body)))
            time.sleep(0.01)
        self.assertEqual(body, BIG)
        self.assertEqual(c.get("/small").body, b"s" * 100)

    def test_rate(self):
        self.assertEqual(Client().get("/rate/big").body[:100], BIG[:100])

    def test_client_closes(self):
        for part in 0, 1:
            self.agent.on_fetch = self.agent.serve_fetch if part else lambda *a: None
            c = Client(rcvbuf=8192)
            c.send("/big")
            self.agent.wait("fetch")
            if part:
                c.s.recv(100000)
            c.close()
        self.assertEqual(Client().get("/small").body, b"s" * 100)

    def test_expired(self):
        self.agent_lifetime(0)
        self.assertEqual(Client().get("/big").body, BIG)
        self.assertEqual(self.outcome(), "fetched:expired")

    def agent_lifetime(self, ms):
        os.pwrite(self.agent.board, struct.pack("=I", ms), agents.HEAD_LIFETIME)


class Refuse(Base):
    """Offers that are wrong in some way, from an upstream whose answers a test chooses."""

    def offer(self, q, **change):
        nonce = bytes.fromhex(re.search("nonce=([0-9a-f]{32})", q).group(1))
        number, length = change.get("number", 7), change.get("length", 50000)
        tag = agents.siphash128(change.get("key", b"K" * 16), nonce + struct.pack("<QQ", number, length))
        return f"1; backend={change.get('name', 'self')}; offer={number:016x}; length={length}; tag={tag.hex()}"

    def answer(self, value, status="200 OK", extra="", body="", length=None):
        length = len(body) if length is None else length
        return (f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nSet-Cookie: a=b\r\nShunt-Payload: {value}\r\n{extra}\r\n"
                f"{body}").encode()

    def refused(self, make, counter, uri="/raw/x", host="127.0.0.5", asked=True, count=1):
        """Checks that an offer is refused, and that the response is asked for once more if there was a consent."""
        whole = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole"
        raw = Raw(lambda q: make(q) if field(q, "Shunt-Consent") or not asked else whole, host)
        try:
            r = Client().get(uri)
        finally:
            raw.close()
        self.assertEqual((r.status, r.body, len(raw.requests)), (200, b"whole", 2) if asked else (502, b"oops page", 1))
        self.assertClean(r)
        self.assertNotIn("set-cookie", r.fields)
        self.assertEqual(self.agent.counters()[counter], count, counter)
        self.assertIn(counter, self.logged())
        return raw

    def logged(self):
        """Returns the log's line about the last refused offer. The line must not have the offer's tag, because a reader
        of the log could claim the body with it."""
        lines = [l for l in read(self.dir + "/error.log").splitlines() if "shunt: upstream's" in l]
        self.assertNotRegex("".join(lines), "(?i)tag=|[0-9a-f]{17}")
        return lines[-1]

    def good_offer(self, q):
        self.agent.offers[7] = (os.open(self.dir + "/www/big", os.O_RDONLY), 0, 50000, b"")
        return self.answer(self.offer(q))

    def test_raw_offer(self):
        """A consent has the right form, and a good offer of an upstream whose answer the test chooses is accepted."""
        ours = {}
        def make(q):
            ours["consent"] = field(q, "Shunt-Consent")
            return self.good_offer(q)
        raw = Raw(make)
        r = Client().get("/raw/x")
        raw.close()
        self.assertRegex(ours["consent"], r"^1; frontend=self; nonce=[0-9a-f]{32}; to=[0-9a-f]{16}; tiers=1$")
        self.assertEqual(r.body, BIG[:50000])
        self.assertEqual(self.outcome(), "shortcut")

    def test_malformed(self):
        n = 0
        for edit in (lambda v: v[:-1], lambda v: v + ";", lambda v: v.replace("; tag", ";tag"), lambda v: v.upper(),
                     lambda v: v.replace("length=50000", "length=050000"), lambda v: v.replace("1;", "2;"),
                     lambda v: v.replace("length=50000", "length=99999999999999999999"),
                     lambda v: v.replace("length=50000", "length=0"), lambda v: v.replace("self", "s" * 64),
                     lambda v: v.replace("self", "se/f"), lambda v: "", lambda v: v.replace("offer=0", "offer=")):
            self.refused(lambda q: self.answer(edit(self.offer(q))), "refused_malformed", count=n + 1)
            n += 1
            self.assertIn("is no offer, refused_malformed", self.logged())
            raw = Raw(self.good_offer)  # this good offer keeps the location giving consents
            self.assertEqual(Client().get("/raw/x").body, BIG[:50000])
            raw.close()

    def test_two_fields(self):
        self.refused(lambda q: self.answer(self.offer(q), extra=f"shunt-payload: {self.offer(q)}\r\n"),
                     "refused_malformed")

    def test_wrong_key(self):
        self.refused(lambda q: self.answer(self.offer(q, key=b"X" * 16)), "refused_tag")

    def test_other_nonce(self):
        self.refused(lambda q: self.answer(self.offer("nonce=" + "0" * 32)), "refused_tag")

    def test_other_length(self):
        self.refused(lambda q: self.answer(self.offer(q).replace("50000", "50001")), "refused_tag")

    def test_lost_session(self):
        """The backend has not noticed yet that the session is lost: its offer is good, and the payload is fetched."""
        def make(q):
            self.agent.set_peer_state(agents.PEER_LOST)
            return self.good_offer(q)
        raw = Raw(make)
        r = Client().get("/raw/x")
        raw.close()
        self.assertEqual((r.status, r.body), (200, BIG[:50000]))
        self.assertEqual(self.outcome(), "fetched:no_session")

    def test_lost_session_and_wrong_key(self):
        self.agent.set_peer_state(agents.PEER_LOST)
        self.refused(lambda q: self.answer(self.offer(q, key=b"X" * 16)), "refused_tag")

    def test_peer_that_was_never_there(self):
        self.agent.set_peer_state(agents.PEER_DOWN)
        self.refused(lambda q: self.answer(self.offer(q)), "refused_unknown_peer")

    def test_no_offer_to_a_lost_peer(self):
        self.agent.set_peer_state(agents.PEER_LOST)
        r = Client().get("/big")
        self.assertEqual((r.status, r.body), (200, BIG))
        self.assertEqual(self.agent.counters()["relayed_no_peer"], 1)

    def test_unknown_peer(self):
        self.refused(lambda q: self.answer(self.offer(q, name="other")), "refused_unknown_peer")

    def test_with_a_body(self):
        self.refused(lambda q: self.answer(self.offer(q), body="hello"), "refused_body")

    def test_chunked(self):
        self.refused(lambda q: (f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nShunt-Payload: {self.offer(q)}\r\n\r\n"
                                "0\r\n\r\n").encode(), "refused_body")

    def test_untrusted_upstream(self):
        self.refused(lambda q: self.answer(self.offer(q)), "refused_untrusted", "/strange/x", "127.0.0.6")

    def test_without_consent(self):
        raw = self.refused(lambda q: self.answer("1; anything"), "refused_untrusted", "/rawoff/x", asked=False)
        self.assertIsNone(field(raw.requests[0], "Shunt-Consent"))

    def test_in_a_redirect_it_is_only_stripped(self):
        raw = Raw(lambda q: self.answer("x", "302 Found", "Location: /y\r\nShunt-Other: z\r\n"))
        r = Client().get("/raw/x")
        raw.close()
        self.assertEqual(r.status, 302)
        self.assertClean(r)

    def test_fields_of_a_client_are_stripped(self):
        raw = Raw(lambda q: b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        consent = good_consent("127.0.0.4", 8081)
        c = Client()
        c.get("/rawoff/x", fields=f"Shunt-Consent: {consent}\r\nX-A: 1\r\nSHUNT-Other: y\r\n")
        c.get("/raw/x", fields=f"Shunt-Consent: {consent}\r\n")
        c.get("/off/big", fields=f"Shunt-Consent: {consent}\r\n")
        raw.close()
        self.assertIsNone(field(raw.requests[0], "Shunt-.*?"))
        self.assertEqual(field(raw.requests[0], "X-A"), "1")
        self.assertEqual(len(re.findall("Shunt-Consent", raw.requests[1])), 1)
        self.assertNotIn("a" * 32, raw.requests[1])
        n = self.agent.counters()
        self.assertEqual((n["forged_request_field"], n["offers"]), (4, 0))

    def test_consent_of_a_trusted_tier(self):
        good = good_consent()
        relayed = [good.replace("self", "other"), good + ";", good[:-1] + "0", good.replace("aaaa", "AAAA"), good + "; from=0",
                   good + "; from=", good + "; from=05", good + "; from=1; from=1", good + "; from=1; rest=1",
                   good + "; rest=1; from=1", good + f"; from={len(BIG) + 1}", good + "; header=4096", good + "; header=0",
                   good + "; header=", good + "; header=08192", good + "; header=8192; from=1",
                   good + "; header=8192; header=8192"]
        taken = [good, good + "; rest=1", good + "; from=1", good + f"; from={len(BIG)}", good + "; header=8192",
                 good + "; from=1; header=8192", good + "; rest=1; header=8192"]
        for value, cl in [(v, 0) for v in taken] + [(v, len(BIG)) for v in relayed]:
            c = Client("127.0.0.2", 8083, source="127.0.0.9")
            c.send("/big", fields=f"Shunt-Consent: {value}\r\n")
            status, fields = c.head()
            self.assertEqual(fields["content-length"], str(cl), value)
            self.assertEqual("shunt-payload" in fields, fields["content-length"] == "0")
            c.close()
        n = self.agent.counters()
        self.assertEqual((n["relayed_no_peer"], n["relayed_short_lived"]), (1, 1))

    def test_intermediate_adds_itself(self):
        c = Client("127.0.0.3", 8082, source="127.0.0.9")
        c.send("/big", fields=f"Shunt-Consent: {good_consent('127.0.0.3', 8082)}; from=5000\r\n")
        self.assertRegex(self.consent(8083), "^1; frontend=self; nonce=a{32}; to=%s; tiers=2; from=5000$" % consents.to())
        status, fields = c.head()
        self.assertRegex(fields["shunt-payload"], "^1; backend=self; offer=[0-9a-f]{16}; length=%d; tag=[0-9a-f]{32}$" % len(BIG))
        self.assertEqual(fields["x-accel-expires"], "0")
        c.close()


class NoAgent(Base):
    start_agent = False

    def test_everything_is_relayed(self):
        c = Client()
        self.assertEqual(c.get("/big").body, BIG)
        self.assertEqual(c.get("/via/text.html").body, TEXT)
        self.assertEqual((self.outcome(), self.outcome(8083)), ("relayed:no_agent", "relayed:no_consent"))
        self.agent = agents.Agent(self.dir)
        wait_for(lambda: self.agent.workers >= 2)
        self.assertEqual(c.get("/big").body, BIG)
        self.assertEqual(self.outcome(n=3), "shortcut")
        self.assertGreater(self.agent.counters()["relayed_no_agent"], 0)  # counted before the agent came


if __name__ == "__main__":
    if os.geteuid() != 0:
        sys.exit("nginx/t/run.py: skipped, it needs root (a BPF ring buffer)")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65536), most))  # the usual 1024 descriptors are too few
    own_network()  # other programs may use these ports on this machine, such as nginx of a run that was killed
    sys.modules["run"] = sys.modules[__name__]  # for the files below, which import this one as `run`
    from again import *
    from board import *
    from configurations import *
    from endings import *
    from header import *
    from late import *
    from lifetime import *
    from limits import *
    from plain import *
    from recovery import *
    from stalled import *
    from stopped import *
    from tls import *
    # Many tests leave it to the interpreter to close a client's connection. One warning for each would hide a failure.
    unittest.main(verbosity=1, warnings="ignore")
