"""Handoffs of TLS connections: the tests' agent (agent.py) sends records that are sealed with the keys that nginx hands
over, and Python's ssl reads them. run.py runs these tests."""
import ctypes, ctypes.util, os, socket, ssl, struct, subprocess

import agent as agents
from run import BIG, TEXT, Base, Client, SeveralRequests

SUITES = {0x1301: ("EVP_aes_128_gcm", 16), 0x1302: ("EVP_aes_256_gcm", 32), 0x1303: ("EVP_chacha20_poly1305", 32)}
GET_TAG = 0x10  # EVP_CTRL_AEAD_GET_TAG
PEER_LOST = 7

crypto = ctypes.CDLL(ctypes.util.find_library("crypto"))
crypto.EVP_CIPHER_CTX_new.restype = ctypes.c_void_p
for name, _ in SUITES.values():
    getattr(crypto, name).restype = ctypes.c_void_p

# Lines by which the frontend of Base.conf also listens for TLS: with one server by default, and another for clients
# that name it (SNI).
TLS = """
        listen 127.0.0.4:8443 ssl; ssl_certificate {dir}/a.pem; ssl_certificate_key {dir}/a.key;
        ssl_protocols TLSv1.2 TLSv1.3; server_name a;
"""
SECOND = """
    server {{
        listen 127.0.0.4:8443 ssl; ssl_certificate {dir}/b.pem; ssl_certificate_key {dir}/b.key; server_name b;
        shunt_trust 127.0.0.2; shunt on;
        location / {{ proxy_pass http://backend; }}
    }}
"""


def seal(h, number, content):
    """Seals one record of application data."""
    name, key_bytes = SUITES[h["tls_suite"]]
    nonce = h["tls_iv"][:4] + (int.from_bytes(h["tls_iv"][4:], "big") ^ number).to_bytes(8, "big")
    header, inner = struct.pack(">BHH", 23, 0x303, len(content) + 17), content + b"\x17"
    out, tag, n = ctypes.create_string_buffer(len(inner)), ctypes.create_string_buffer(16), ctypes.c_int()
    c = ctypes.c_void_p(crypto.EVP_CIPHER_CTX_new())
    cipher = ctypes.c_void_p(getattr(crypto, name)())
    assert crypto.EVP_EncryptInit_ex(c, cipher, None, h["tls_key"][:key_bytes], nonce) == 1
    assert crypto.EVP_EncryptUpdate(c, None, ctypes.byref(n), header, 5) == 1
    assert crypto.EVP_EncryptUpdate(c, out, ctypes.byref(n), inner, len(inner)) == 1
    assert crypto.EVP_EncryptFinal_ex(c, tag, ctypes.byref(n)) == 1
    assert crypto.EVP_CIPHER_CTX_ctrl(c, GET_TAG, 16, tag) == 1
    crypto.EVP_CIPHER_CTX_free(c)
    return header + out.raw + tag.raw


def sealed(h, payload):
    step = h["tls_content_bytes"]
    pieces = [payload[i:i + step] for i in range(0, len(payload), step)]
    return b"".join(seal(h, h["tls_record"] + i, piece) for i, piece in enumerate(pieces))[h["tls_skip"]:]


class TlsClient(Client):
    def __init__(self, name="a", suite=None, version=None, session=None, context=None):
        self.context = context or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE
        if version:
            self.context.maximum_version = version
        s = socket.create_connection(("127.0.0.4", 8443), 10)
        self.s = self.context.wrap_socket(s, server_hostname=name, session=session, suppress_ragged_eofs=False)
        self.f = self.s.makefile("rb")


class Tls(SeveralRequests, Base):
    client, crowd = TlsClient, (8, 5)
    conf = Base.conf.replace("listen 127.0.0.4:8081;", "listen 127.0.0.4:8081;" + TLS).rstrip().removesuffix("}}") + SECOND + "}}\n"

    def setUp(self):
        super().setUp()
        self.agent.on_handoff = self.serve

    def prepare(self):
        for name in "ab":
            subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                            "-subj", "/CN=" + name, "-keyout", f"{self.dir}/{name}.key", "-out", f"{self.dir}/{name}.pem"],
                           check=True, capture_output=True)

    def serve(self, s, h):
        c = self.agent.client_socket(h["handoff"])
        payload = self.agent.payload(h["offer"])
        self.assertEqual(len(payload), h["length"])
        wire = sealed(h, payload)
        self.agent.deliver(c, wire)
        self.agent.ring.post(h["handoff"], len(wire), agents.COMPLETE)
        c.close()

    def handoffs(self, n):
        return [self.agent.wait("handoff") for _ in range(n)]

    def outcome(self, n=1):
        return self.log(8443, n)[3]

    def test_many_over_one_connection(self):
        c = TlsClient()
        for _ in range(5):
            self.assertEqual(c.get("/big").body, BIG)
            self.assertEqual(c.get("/text.html").body, TEXT)
        self.assertEqual(self.log(8443, 10)[2:6], ["200", "shortcut", str(len(TEXT)), str(len(TEXT))])
        keys = self.handoffs(10)
        # Tickets were sent under the first key, so the first payload gets a new key, and begins with record 0. Each
        # later payload follows its header under one key, and begins with record 1.
        self.assertEqual([h["tls_record"] for h in keys], [0] + [1] * 9)
        self.assertEqual(len({(h["tls_key"], h["tls_iv"]) for h in keys}), 10)
        self.assertEqual({(h["tls_content_bytes"], h["tls_skip"]) for h in keys}, {(16384, 0)})

    def test_a_key_covers_no_other_response(self):
        c = TlsClient()
        for _ in range(3):
            self.assertEqual(c.get("/text.html").body, TEXT)
            self.assertEqual(c.get("/small").body, b"s" * 100)  # relayed, under the next generation
        self.assertEqual([h["tls_record"] for h in self.handoffs(3)], [0, 0, 0])

    def test_each_name_has_its_certificate_and_shortcuts(self):
        for name in "ab":
            c = TlsClient(name)
            self.assertIn(b"\x0c\x01" + name.encode(), c.s.getpeercert(True))
            self.assertEqual(c.get("/big").body, BIG)
            self.assertEqual(self.outcome("ab".index(name) + 1), "shortcut")

    def test_resumed_session(self):
        c = TlsClient()
        self.assertEqual(c.get("/text.html").body, TEXT)
        again = TlsClient(session=c.s.session, context=c.context)
        self.assertTrue(again.s.session_reused)
        self.assertEqual(again.get("/big").body, BIG)
        self.assertEqual(self.outcome(2), "shortcut")

    def test_tls_1_2_is_relayed(self):
        self.assertEqual(TlsClient(version=ssl.TLSVersion.TLSv1_2).get("/big").body, BIG)
        self.assertEqual(self.outcome(), "relayed:tls_version")

    def test_a_filter_gets_the_body(self):
        c = TlsClient()
        self.assertEqual(c.get("/sub/text.html").body, TEXT.replace(b"needle", b"thread"))
        self.assertEqual(self.outcome(), "fetched:filter")
        self.assertEqual(c.get("/text.html").body, TEXT)
        self.assertEqual(self.outcome(2), "shortcut")

    def ended(self, part, then=None):
        """Has the backend send `part` of the records and then give up. `then` serves the next handoff; without it, the
        next handoff is given up likewise."""
        def serve(s, h):
            self.agent.on_handoff = then or serve
            c = self.agent.client_socket(h["handoff"])
            wire = sealed(h, self.agent.payload(h["offer"]))
            self.agent.deliver(c, wire[:int(len(wire) * part)])
            c.close()
            self.agent.end(s, h["handoff"], PEER_LOST)

        self.agent.on_handoff = serve

    def test_another_goes_on_in_mid_record(self):
        c = TlsClient()
        for part in 0, 0.0001, 0.1, 0.4, 0.77, 0.9999:
            self.ended(part, self.serve)
            self.assertEqual(c.get("/big").body, BIG)
            first, rest = self.handoffs(2)
            self.assertEqual((rest["tls_key"], rest["tls_iv"]), (first["tls_key"], first["tls_iv"]))
            whole = len(BIG) - rest["length"]
            self.assertEqual((whole % 16384, rest["tls_record"] - first["tls_record"]), (0, whole // 16384))
            sent = int((len(BIG) + 22 * -(-len(BIG) // 16384)) * part)
            self.assertEqual(rest["tls_skip"], sent - whole // 16384 * 16406)

    def test_a_handoff_that_is_given_up_ends_in_a_reset(self):
        for part in 0, 0.4:
            self.ended(part)
            c = TlsClient()
            c.send("/big")
            _, fields = c.head()
            self.assertEqual(fields["content-length"], str(len(BIG)))
            got = b""
            with self.assertRaises((ConnectionResetError, ssl.SSLError)) as caught:
                while True:
                    piece = c.s.recv(1 << 16)
                    self.assertNotEqual(piece, b"", "an orderly end")
                    got += piece
            self.assertNotIsInstance(caught.exception, ssl.SSLZeroReturnError)
            self.assertEqual(got, BIG[:len(got)])
        self.agent.on_handoff = self.serve
        self.assertEqual(TlsClient().get("/big").body, BIG)
