"""Handoffs that end in an unusual way: the client closes at once, the worker has to exit, or the agent ends. A handoff
lets a backend send a body on the client's connection. run.py runs these tests."""
import os, re, signal, struct, subprocess, sys, threading

import agent as agents
from consents import CONSENT
from run import BIG, TEXT, Base, Client, read
from tls import Tls, TlsClient
from wait import PATIENCE, wait_for

# Program that writes 0 and 1 in turn into the field `alive` of the board, memory that the agent shares with nginx. The
# field says whether the agent runs.
FLIPPER = "import mmap, sys\nboard = mmap.mmap(int(sys.argv[1]), 4096)\nwhile True:\n    board[16] = 0\n    board[16] = 1\n"


def worker_of(nginx):
    return int(read(f"/proc/{nginx.pid}/task/{nginx.pid}/children").split()[0])


def close(c):
    c.f.close()
    c.s.close()


class Completion(Base):
    conf = Base.conf.replace("access_log {dir}/access.log t;", """access_log {dir}/access.log t;
    log_format e '$request_uri $status $shunt $shunt_bytes "$request_completion"'; access_log {dir}/ends.log e;""")

    def ends(self):
        return [l for l in read(self.dir + "/ends.log").splitlines() if l.startswith("/")]

    def closes_with_its_last_acknowledgement(self, uri, n):
        """The client has acknowledged the whole payload and has closed before the worker handles either of these
        events."""
        worker, served, closed = worker_of(self.nginx), threading.Event(), threading.Event()

        def serve(s, h):
            os.kill(worker, signal.SIGSTOP)
            c = self.agent.client_socket(h["handoff"])
            self.agent.write(c, self.agent.payload(h["offer"]))
            closed.wait(PATIENCE)
            agents.wait_acked(c.fileno())
            self.agent.ring.post(h["handoff"], h["length"], agents.COMPLETE)
            c.close()
            os.kill(worker, signal.SIGCONT)
            served.set()

        self.agent.on_handoff = serve
        c = Client()
        self.assertEqual(c.get(uri).body, BIG)
        close(c)
        closed.set()
        self.assertTrue(served.wait(PATIENCE))
        # Each response has two lines in the log: the backend's, and then the frontend's.
        wait_for(lambda: len(self.ends()) >= 2 * n)
        self.assertEqual(self.ends()[-1], f'{uri} 200 shortcut {len(BIG)} "OK"')

    def test_of_a_client_that_closes_with_its_last_acknowledgement(self):
        for n, uri in enumerate(("/big", "/deaf/big", "/big", "/unbuffered/big")):
            self.closes_with_its_last_acknowledgement(uri, n + 1)
        n = self.agent.counters()
        self.assertEqual((n["shortcuts"], n["aborted"]), (4, 0))

    def test_of_a_client_that_closes_before_the_end(self):
        self.agent.on_handoff = lambda s, h: None
        c = Client()
        c.send("/big")
        c.head()
        self.agent.wait("handoff")
        close(c)
        self.agent.wait("abort")
        wait_for(lambda: len(self.ends()) >= 2)
        self.assertEqual(self.ends()[-1], '/big 200 shortcut 0 ""')


class Shutdown(Tls):
    conf = Tls.conf.replace("user root;", "user root; worker_shutdown_timeout 1s;")

    def ends(self, client, uri, waits):
        self.agent.on_handoff = lambda s, h: None
        self.agent.on_fetch = lambda s, fetch, offer, length: None
        c = client()
        c.send(uri)
        self.agent.wait(waits)
        self.nginx.send_signal(signal.SIGQUIT)
        try:
            self.nginx.wait(20)
        except subprocess.TimeoutExpired:
            self.fail(f"a worker waits for {uri}")
        with self.assertRaises(OSError):
            if c.receive().status == 502:
                raise ConnectionError

    def test_ends_a_handoff(self):
        self.ends(Client, "/big", "handoff")

    def test_ends_a_handoff_to_a_client_whose_fin_is_ignored(self):
        self.ends(Client, "/deaf/big", "handoff")

    def test_ends_a_handoff_on_tls(self):
        self.ends(TlsClient, "/big", "handoff")

    def test_ends_a_fetch(self):
        self.ends(Client, "/sub/text.html", "fetch")


# Removes the tests that Shutdown inherits from Tls, because tls.py runs them.
for name in [name for name in dir(Tls) if name.startswith("test_")]:
    setattr(Shutdown, name, None)


class Vanishing(Base):
    def test_the_board_may_vanish_between_any_two_looks(self):
        flipper = subprocess.Popen([sys.executable, "-c", FLIPPER, str(self.agent.board)], pass_fds=[self.agent.board])
        try:
            direct, client = Client("127.0.0.2", 8083, source="127.0.0.9"), Client()
            for _ in range(500):
                r = direct.get("/text.html", fields=CONSENT)
                self.assertEqual((r.status, r.body), (200, b"" if "shunt-payload" in r.fields else TEXT))
                self.assertEqual(client.get("/text.html").body, TEXT)
        finally:
            flipper.kill()
            flipper.wait()


class Unsent(Tls):
    def test_keys_that_did_not_leave_are_wiped(self):
        worker = worker_of(self.nginx)
        self.agent.on_begin = lambda handoff: self.agent.close()
        c = TlsClient()
        c.send("/big")
        with self.assertRaises(OSError):
            c.receive()
        self.agent = None
        self.assertEqual({key for key in self.handoffs_in_memory(worker)} - {bytes(32)}, set())

    def handoffs_in_memory(self, pid):
        """Yields the TLS key of each HANDOFF message, or whatever looks like one, in this worker's memory."""
        size = struct.calcsize(agents.HANDOFF_FORMAT)
        whole = struct.pack("=IIII", agents.HANDOFF, size, 0, 2)
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for line in maps:
                start, end, rights = re.match(r"(\w+)-(\w+) (\S+)", line).groups()
                if not rights.startswith("rw") or "[heap]" not in line and "[stack]" not in line and len(line.split()) > 5:
                    continue
                try:
                    memory.seek(int(start, 16))
                    data = memory.read(int(end, 16) - int(start, 16))
                except OSError:
                    continue
                for found in re.finditer(re.escape(whole), data):
                    yield data[found.start() + size - 36:found.start() + size - 4]


for name in [name for name in dir(Tls) if name.startswith("test_")]:
    setattr(Unsent, name, None)
