"""Tiers (servers on a request's path) without Shunt, and the server that a consent is meant for. A consent is the
header field by which tiers with Shunt say that they may be bypassed.

The plain tier is an nginx without the module: 127.0.0.7:8087, which connects to the next tier from 127.0.0.8. Two
backends trust that address: 127.0.0.2:8083 as an ordinary tier, 127.0.0.2:8088 as "plain".
"""
import gzip, os, re, socket, struct, subprocess, threading

import consents
from run import BIG, HEAD, TEXT, Base, Client, Raw, field, read
from wait import wait_for

SSI = b"<p>" + b"x" * 70000 + b'<!--#echo var="uri" --></p>\n'
GZIP = "Accept-Encoding: gzip\r\n"

PLAIN = """
user root; worker_processes 1; daemon off; pid {dir}/plain.pid; error_log {dir}/plain.log;
events {{ worker_connections 512; }}
http {{
    client_body_temp_path {dir}/pa; proxy_temp_path {dir}/pb; fastcgi_temp_path {dir}/pc;
    uwsgi_temp_path {dir}/pd; scgi_temp_path {dir}/pe; proxy_cache_path {dir}/pcache keys_zone=z:1m;
    access_log off; proxy_bind 127.0.0.8; proxy_http_version 1.1; proxy_set_header Connection "";
    proxy_cache_valid 200 1m; proxy_ignore_headers X-Accel-Expires;
    server {{
        listen 127.0.0.7:8087;
        location / {{ proxy_pass http://127.0.0.2:8083; }}
        location /ssi/ {{ ssi on; proxy_pass http://127.0.0.2:8083/; }}
        location /sub/ {{ sub_filter needle thread; sub_filter_once off; proxy_pass http://127.0.0.2:8083/; }}
        location /gzip/ {{ gzip on; gzip_proxied any; proxy_pass http://127.0.0.2:8083/; }}
        location /cache/ {{ proxy_cache z; proxy_pass http://127.0.0.2:8083/; }}
        location /plain/ {{ proxy_pass http://127.0.0.2:8088/; }}
        location /counting/ {{ proxy_pass http://127.0.0.3:8082/; }}
    }}
}}
"""

# Upstreams, by name: one for each method to choose a server, combined with other directives before and after it.
BALANCERS = {
    "least": "least_conn; keepalive 2;", "hash": "hash $uri consistent;", "ip": "ip_hash; zone ip 64k; keepalive 2;",
    "random": "zone random 64k; random two least_conn;", "keep": "keepalive 2;", "none": "",
}

CONF = HEAD + """
    resolver 127.0.0.5:5353 ipv6=off;
    """ + "".join(f"upstream {name} {{{{ server 127.0.0.2:8083; {lines} }}}}\n" for name, lines in BALANCERS.items()) + """
    upstream path {{ server unix:{dir}/backend.sock; keepalive 2; }}
    upstream twice {{ server 127.0.0.5:8085 max_fails=0; server 127.0.0.2:8083 backup; keepalive 2; }}
    root {dir}/www; charset off; shunt_offer on;
    server {{ listen 127.0.0.2:8083; shunt_trust 127.0.0.9 127.0.0.8; }}
    server {{ listen 127.0.0.2:8088; shunt_trust 127.0.0.9; shunt_trust 127.0.0.8 unix: plain; }}
    server {{ listen unix:{dir}/backend.sock; shunt_trust unix:; }}
    server {{ listen 8089; listen [::]:8090 ipv6only=off; shunt_trust 127.0.0.9; }}
    server {{ # intermediate
        listen 127.0.0.3:8082; shunt_trust 127.0.0.9 127.0.0.8 127.0.0.2 127.0.0.7; shunt_offer off;
        location / {{ proxy_pass http://127.0.0.2:8083; }}
        location /to-plain/ {{ proxy_pass http://127.0.0.7:8087/; }}
    }}
    server {{ # frontend
        listen 127.0.0.4:8081; shunt_trust 127.0.0.2 127.0.0.3 127.0.0.7 unix:; shunt on; shunt_offer off;
        location / {{ proxy_pass http://127.0.0.7:8087; }}
        location /inter/ {{ proxy_pass http://127.0.0.3:8082/; }}
        location /twice/ {{ proxy_pass http://twice/; proxy_next_upstream error; }}
        location /any/ {{ proxy_pass http://127.0.0.2:8089/; }}
        location /mapped/ {{ proxy_pass http://127.0.0.2:8090/; }}
        location /path/ {{ proxy_pass http://path/; proxy_bind off; }}
        location /other-path/ {{ proxy_pass http://unix:{dir}/link.sock:/; proxy_bind off; }}
        location /address/ {{
            set $next 127.0.0.2:$arg_port; rewrite ^/address(/.*)$ $1 break; proxy_pass http://$next;
        }}
        location /name/ {{
            set $next two.test:$arg_port; rewrite ^/name(/.*)$ $1 break; proxy_pass http://$next;
        }}
        location /group/ {{
            set $next keep; rewrite ^/group(/.*)$ $1 break; proxy_pass http://$next;
        }}
        """ + "".join(f"location /{name}/ {{{{ proxy_pass http://{name}/; }}}}\n" for name in BALANCERS) + """
    }}
}}
"""


class Names(threading.Thread):
    """A name server that answers every question with 127.0.0.2."""

    def __init__(self):
        super().__init__(daemon=True)
        self.s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.s.bind(("127.0.0.5", 5353))
        self.start()

    def run(self):
        while True:
            question, at = self.s.recvfrom(512)
            if at == self.s.getsockname():
                return
            answer = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 60, 4) + socket.inet_aton("127.0.0.2")
            self.s.sendto(question[:2] + struct.pack(">HHHHH", 0x8180, 1, 1, 0, 0) + question[12:] + answer, at)

    def close(self):
        self.s.sendto(b".", self.s.getsockname())
        self.join()
        self.s.close()


class Plain(Base):
    conf = CONF

    def prepare(self):
        with open(self.dir + "/www/page.html", "wb") as f:
            f.write(SSI)
        os.symlink(self.dir + "/backend.sock", self.dir + "/link.sock")
        with open(self.dir + "/plain.conf", "w") as f:
            f.write(PLAIN.format(dir=self.dir))
        self.plain = subprocess.Popen(["nginx", "-c", self.dir + "/plain.conf", "-e", self.dir + "/plain.log"])
        self.addCleanup(self.plain.wait)
        self.addCleanup(self.plain.terminate)
        wait_for(lambda: os.path.exists(self.dir + "/plain.pid"))
        names = Names()
        self.addCleanup(names.close)

    def whole(self, uri, body=BIG, fields=""):
        c = Client()
        r = c.get(uri, fields=fields)
        c.close()
        came = gzip.decompress(r.body) if r.fields.get("content-encoding") == "gzip" else r.body
        self.assertEqual((r.status, came == body), (200, True), uri)
        self.assertClean(r)
        return r

    def told(self):
        return [line for line in read(self.dir + "/error.log").splitlines() if "shunt_trust" in line]


class PlainTiers(Plain):
    def test_without_a_word_bodies_pass_through_a_plain_tier(self):
        for n in range(1, 4):
            self.whole("/big")
            self.assertEqual((self.outcome(n=n), self.outcome(8083, n)), ("-", "relayed:plain"))
        n = self.agent.counters()
        self.assertEqual((n["offers"], n["relayed_plain"], n["asked_again"]), (0, 3, 0))
        told = self.told()
        self.assertEqual(len(told), 1, told)
        self.assertIn("[error]", told[0])
        self.assertIn('"shunt_trust 127.0.0.8 plain;"', told[0])

    def test_filters_and_caches_of_a_plain_tier_see_whole_bodies(self):
        self.whole("/sub/text.html", TEXT.replace(b"needle", b"thread"))
        self.whole("/ssi/page.html", SSI.replace(b'<!--#echo var="uri" -->', b"/ssi/page.html"))
        zipped = self.whole("/gzip/text.html", TEXT, GZIP)
        self.assertEqual(zipped.fields["content-encoding"], "gzip")
        for _ in range(3):  # the second one comes from the cache
            self.whole("/cache/big")
        self.assertEqual(self.agent.counters()["offers"], 0)

    def test_what_is_not_offered_anyway_is_not_said(self):
        self.whole("/small", b"s" * 100)
        self.assertEqual((self.outcome(8083), self.told()), ("relayed:too_small", []))

    def test_with_the_operators_word_bodies_go_past_a_plain_tier(self):
        self.whole("/plain/big")
        self.assertEqual((self.outcome(), self.outcome(8088), self.told()), ("shortcut", "offered", []))

    def test_an_intermediate_behind_a_plain_tier_relays(self):
        self.whole("/counting/big")
        self.assertEqual((self.outcome(8082), self.outcome(8083)), ("relayed:plain", "relayed:no_consent"))
        self.assertIn('"shunt_trust 127.0.0.8 plain;"', self.told()[0])

    def test_a_plain_tier_behind_an_intermediate_is_seen_and_may_be_trusted(self):
        self.whole("/inter/to-plain/big")
        self.assertEqual(self.outcome(8083), "relayed:plain")
        self.whole("/inter/to-plain/plain/big")
        self.assertEqual((self.outcome(n=2), self.outcome(8088)), ("shortcut", "offered"))


class Strangers(Plain):
    """Consents from addresses that no shunt_trust names."""

    def test_the_first_addresses_are_said_once_each(self):
        for host in [f"127.0.1.{n}" for n in range(1, 12)] * 2:
            c = Client(port=8083, host="127.0.0.2", source=host)
            r = c.get("/big", fields=consents.CONSENT)
            c.close()
            self.assertTrue(r.body == BIG)
        told = self.told()
        self.assertEqual(len(told), 8, told)
        for n, line in enumerate(told, 1):
            self.assertIn("[error]", line)
            self.assertIn(f'add "shunt_trust 127.0.1.{n};"', line)
        self.assertEqual(self.agent.counters()["forged_request_field"], 22)

    def test_a_field_that_is_no_consent_is_not_said(self):
        c = Client(port=8083, host="127.0.0.2")
        r = c.get("/big", fields="Shunt-Consent: 1; frontend=x\r\nShunt-Other: 1\r\n")
        c.close()
        self.assertEqual((r.body == BIG, self.told()), (True, []))


class Meant(Plain):
    """The consent is meant for the next server, in whatever way nginx chooses that server."""

    def test_intermediates_renew_it(self):
        self.whole("/inter/big")
        self.assertEqual(self.outcome(), "shortcut")

    def test_every_balancer_has_its_say(self):
        for name in BALANCERS:
            for n in range(3):  # later requests are sent on a kept connection, at once
                self.whole(f"/{name}/big")
        self.assertEqual(self.agent.counters()["shortcuts"], 3 * len(BALANCERS))

    def test_upstreams_that_variables_name(self):
        for uri in "/address/big?port=8083", "/name/big?port=8083", "/group/big":
            for _ in range(3):
                self.whole(uri)
        self.assertEqual(self.agent.counters()["shortcuts"], 9)

    def test_servers_that_listen_at_any_address(self):
        for uri in "/any/big", "/mapped/big", "/address/big?port=8090":
            self.whole(uri)
        self.assertEqual(self.agent.counters()["shortcuts"], 3)

    def test_unix_sockets_are_known_by_their_paths(self):
        for _ in range(2):
            self.whole("/path/big")
        self.whole("/other-path/big")
        self.assertEqual(self.agent.counters()["shortcuts"], 2)
        self.assertIn('"shunt_trust unix: plain;"', self.told()[0])

    def test_it_is_written_anew_for_each_try(self):
        raw = Raw(lambda q: b"")
        self.addCleanup(raw.close)
        for n in range(1, 4):
            self.whole("/twice/big")
            self.assertEqual(self.outcome(n=n), "shortcut")
            first, second = (re.search("nonce=(.{32}); to=(.{16});", value).groups()
                             for value in (field(raw.requests[n - 1], "Shunt-Consent"), self.consent(8083, n)))
            self.assertEqual(first, (second[0], consents.to("127.0.0.5", 8085, first[0])))
            self.assertEqual(second[1], consents.to(nonce=second[0]))


class Trust(Plain):
    def test_what_shunt_trust_takes(self):
        def test(lines):
            with open(self.dir + "/trust", "w") as f:
                f.write(f"load_module {self.module}; error_log {self.dir}/x; pid {self.dir}/trust.pid; events {{}}\n"
                        f"http {{ access_log off; server {{ listen 127.0.0.2:8099; {lines} }} }}")
            check = subprocess.run(["nginx", "-t", "-c", self.dir + "/trust"], capture_output=True, text=True)
            return check.returncode == 0, check.stderr

        for lines in ("shunt_trust 10.0.0.1 plain;", "shunt_trust 10.0.0.1; shunt_trust 10.0.0.2 unix: plain;",
                      "shunt_trust all plain;", "shunt_trust none;"):
            self.assertTrue(*test(lines))
        for lines, said in (("shunt_trust plain;", 'invalid address or network "plain"'),
                            ("shunt_trust plain 10.0.0.1;", 'invalid address or network "plain"'),
                            ("shunt_trust none; shunt_trust 10.0.0.1;", "none"),
                            ("shunt_trust 10.0.0.1; shunt_trust none;", "none"), ("shunt_trust none plain;", "none")):
            good, text = test(lines)
            self.assertIn(said, text)
            self.assertFalse(good, lines)
