"""A small agent for the module's tests: the local protocol of include/shunt.h, without a network.

It is the agent of both frontend and backend ("self"), so one nginx can claim a body that it has offered itself. It
serves a handoff (a backend's sending of a body on the client's connection) by writing into nginx's socket for the
client, which kernel_shim.c passes to the agent. Completion goes through a real BPF ring buffer.

A claim is the message that asks for an offered body. The board is memory that the agent writes and nginx reads. Each
worker numbers its own handoffs, so two workers may use the same number. In this file and in the tests, a handoff's
number is therefore the number of its worker's ring (BPF ring buffer) times 2^64, plus the number that the worker has
given the handoff. The first ring has the number 0, so with one worker both numbers of a handoff are equal.
"""
import array, contextlib, ctypes, fcntl, hashlib, ipaddress, itertools, mmap, os, re, socket, struct, termios
import threading, time

from wait import PATIENCE

MASK = (1 << 64) - 1
HELLO, WELCOME, OFFER, HANDOFF, ABORT, ENDED, FETCH, FETCHED = range(1, 9)
PROVE, DIGEST, WITHDRAWN = 15, 16, 17
OPTION_DIGEST = 8
CONTROL, OFFERS = 1, 2
BEGIN, CANCEL, STATE, MOVE, WATCH = 1, 2, 3, 4, 7
UNPROVEN, UNSENT, NO_PEER, FAMILY = 4, 5, 6, 7  # statuses of a refused region
COMPLETE, RESET = 1, 2
NO_WAKEUP = 1  # BPF_RB_NO_WAKEUP
HEAD_BYTES, PEER_BYTES, PEERS = 120, 1396, 256
# Byte offsets of fields in the board, and in an entry of it.
HEAD_ALIVE, HEAD_LIFETIME, HEAD_CLOSED, HEAD_BEAT, HEAD_PEERS, PEER_CLOSED = 16, 28, 32, 40, 44, 8
PEER_PREFIXES = 112
EVERYWHERE = ["::/0", "0.0.0.0/0"]
OFFER_BODY = 1
CLOSED_OFFERS, CLOSED_HANDOFFS = 1, 2
PEER_DOWN, PEER_UP, PEER_LOST = range(3)
COUNTERS_BYTES = 64 * 8 + PEERS * 4
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../include/shunt.h")) as header:
    SHUNT_H = header.read()
VERSION = int(re.search(r"#define SHUNT_VERSION\s+(\d+)", SHUNT_H)[1])
COUNTERS = {name: int(index) for index, name in re.findall(r"X\((\d+), (\w+), ", SHUNT_H)}

OFFER_FORMAT = "=IIIIQQQ16s16sqQ"
HANDOFF_FORMAT = "=IIIIIIQQQQ16s16s16s16s2s2sIIIIIIIIIIIHBBBB2sHHHHQ12s32s4x"
FETCH_FORMAT = "=IIIIQQQ16s16s"


def siphash128(key, data):
    def rotl(x, b):
        return ((x << b) | (x >> (64 - b))) & MASK

    def rounds(n):
        nonlocal v0, v1, v2, v3
        for _ in range(n):
            v0 = (v0 + v1) & MASK; v1 = rotl(v1, 13) ^ v0; v0 = rotl(v0, 32)
            v2 = (v2 + v3) & MASK; v3 = rotl(v3, 16) ^ v2
            v0 = (v0 + v3) & MASK; v3 = rotl(v3, 21) ^ v0
            v2 = (v2 + v1) & MASK; v1 = rotl(v1, 17) ^ v2; v2 = rotl(v2, 32)

    k0, k1 = struct.unpack("<QQ", key)
    v0, v1 = 0x736f6d6570736575 ^ k0, 0x646f72616e646f6d ^ k1 ^ 0xee
    v2, v3 = 0x6c7967656e657261 ^ k0, 0x7465646279746573 ^ k1
    tail = data[len(data) // 8 * 8:]
    words = list(struct.unpack(f"<{len(data) // 8}Q", data[:len(data) // 8 * 8]))
    words.append(int.from_bytes(tail, "little") | (len(data) & 255) << 56)
    for m in words:
        v3 ^= m; rounds(2); v0 ^= m
    v2 ^= 0xee; rounds(4); low = v0 ^ v1 ^ v2 ^ v3
    v1 ^= 0xdd; rounds(4)
    return struct.pack("<QQ", low, v0 ^ v1 ^ v2 ^ v3)


assert siphash128(bytes(range(16)), b"").hex() == "a3817f04ba25a8e66df67214c7550293"  # the authors' test vector


class Ring:
    """A BPF ring buffer, and BPF programs that copy a record into it. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)

    def bpf(self, command, attr):
        buf = ctypes.create_string_buffer(attr.ljust(144, b"\0"), 144)
        rc = self.libc.syscall(321, command, buf, 144)
        if rc < 0:
            raise OSError(ctypes.get_errno(), f"bpf({command})")
        return rc

    def __init__(self):
        self.map = self.bpf(0, struct.pack("=IIII", 27, 0, 0, 1 << 16))
        self.programs = {}

    def program(self, size, flags):
        if (size, flags) in self.programs:
            return self.programs[size, flags]
        ins = b""
        def i(op, dst=0, src=0, off=0, imm=0):
            nonlocal ins
            ins += struct.pack("=BBhi", op, dst | src << 4, off, imm)
        i(0xbf, 6, 1)
        for k in range(0, size, 8):
            i(0x79, 1, 6, k)
            i(0x7b, 10, 1, k - size)
        i(0x18, 1, 1, 0, self.map); i(0)
        i(0xbf, 2, 10); i(0x07, 2, 0, 0, -size); i(0xb7, 3, 0, 0, size); i(0xb7, 4, 0, 0, flags)
        i(0x85, 0, 0, 0, 130); i(0x95)
        code = ctypes.create_string_buffer(ins, len(ins))
        license = ctypes.create_string_buffer(b"GPL")
        attr = struct.pack("=IIQQIIQII", 31, len(ins) // 8, ctypes.addressof(code), ctypes.addressof(license),
                           0, 0, 0, 0, 1 << 4)
        return self.programs.setdefault((size, flags), self.bpf(5, attr))

    def write(self, record, flags=0):
        ctx = ctypes.create_string_buffer(record, len(record))
        attr = struct.pack("=IIIIQQIIIIQQ", self.program(len(record), flags), 0, 0, 0, 0, 0, 0, 0, len(record), 0,
                           ctypes.addressof(ctx), 0)
        self.bpf(10, attr)


class Rings:
    """Completion rings: one for each control connection, and so for each worker."""

    def __init__(self):
        self.rings = []

    def add(self):
        ring = Ring()
        self.rings.append(ring)
        return self.rings.index(ring)  # not the last index: another thread may have added a ring meanwhile

    def post(self, handoff, acked, kind):
        self.rings[handoff >> 64].write(struct.pack("=QQII", handoff & MASK, acked, kind, 0))


def wait_acked(fd):
    for _ in range(20000):
        n = array.array("i", [0])
        fcntl.ioctl(fd, termios.TIOCOUTQ, n)
        if n[0] == 0:
            return True
        time.sleep(0.0005)
    return False


class Agent:
    netns = 0                                 # cookie of the network namespace; 0: not known

    def __init__(self, directory, key=b"K" * 16, lifetime_ms=10000, frontend=1, with_ring=True, families=3, speaks_for=EVERYWHERE,
                 versions=(VERSION, VERSION), wider=0, welcome_bytes=None):
        self.path = os.path.join(directory, "shuntd.sock")
        self.shim_path = os.path.join(directory, "shim.sock")
        self.key = key
        self.messages, self.offers, self.sockets = [], {}, {}
        self.flags = []                       # flags of offers, in their order
        self.on_handoff = self.serve          # called for messages; tests replace these functions
        self.on_fetch = self.serve_fetch
        self.on_offer = lambda number, trace: None
        self.on_begin = lambda handoff: None  # called after SHUNT_BEGIN, before the worker continues
        self.on_digest = self.tell_digest     # called for a handoff with OPTION_DIGEST, and for PROVE
        self.changed = threading.Condition()
        self.refusal = lambda handoff: 0      # status with which SHUNT_BEGIN is refused; 0: not refused
        self.takes_offers = threading.Event()  # if cleared, the agent reads one more offer, and then none
        self.takes_offers.set()
        self.ring = Rings() if with_ring else None
        self.is_answer_lost = lambda: False   # True: the ring has no room for the kernel's answer
        self.before_answer = lambda handoff, client: None  # called before the answer to SHUNT_BEGIN
        self.ring_of = {}                     # number of each control connection's ring
        self.workers, self.numbers = 0, itertools.count(1)
        self.counter_maps, self.connections, self.offering = [], [], set()
        # Versions that the agent speaks, and number of bytes by which three things are longer than in this version: the
        # board's part before the entries, each entry, and the welcome.
        self.versions, self.wider = versions, wider
        self.welcome_bytes = welcome_bytes or 32 + wider
        board = os.memfd_create("board")
        peer = lambda name: struct.pack("=IIII64s16s16s", 2, PEER_UP, 0, families, name, key, key)
        data = struct.pack("=IHHIIIIIIIIIIQ64s", 0x53424f41, *versions, self.peer_at(0), PEER_BYTES + wider, 1, frontend, 1,
                           lifetime_ms, 0, families, 1, 1, self.netns, b"self") + b"\xff" * wider + peer(b"self")
        os.ftruncate(board, self.peer_at(PEERS))
        os.pwrite(board, data, 0)
        self.board = board
        self.set_prefixes(speaks_for)
        for p in (self.path, self.shim_path):
            if os.path.exists(p):
                os.unlink(p)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.path); os.chmod(self.path, 0o777)
        self.listener.listen(64)
        self.shim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.shim.bind(self.shim_path); os.chmod(self.shim_path, 0o777)
        self.beats = threading.Event()        # if cleared, the agent seems to be stopped
        self.beats.set()
        threading.Thread(target=self.accept, daemon=True).start()
        threading.Thread(target=self.beat, daemon=True).start()
        threading.Thread(target=self.shim_loop, daemon=True).start()

    def peer_at(self, index):
        """Returns the byte offset of an entry of the board."""
        return HEAD_BYTES + self.wider + index * (PEER_BYTES + self.wider)

    def close(self):
        os.pwrite(self.board, struct.pack("=I", 0), HEAD_ALIVE)
        self.vanish()
        if os.path.exists(self.path):
            os.unlink(self.path)

    def vanish(self):
        """Ends like an agent that is killed: the board still says that it is alive."""
        self.beats.clear()
        # shutdown() wakes the threads that wait in accept() and recv(); close() alone would not.
        for s in [self.listener] + self.connections:
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            s.close()

    def add_peer(self, name, prefixes):
        """Adds a peer that is connected and offers nothing."""
        entry = struct.pack("=IIII64s16s16s", 2, PEER_UP, 0, 3, name, self.key, self.key)
        os.pwrite(self.board, entry, self.peer_at(1))
        os.pwrite(self.board, struct.pack("=I", 2), HEAD_PEERS)
        self.set_prefixes(prefixes, peer=1)

    def beat(self):
        for n in itertools.count(1):
            self.beats.wait()
            os.pwrite(self.board, struct.pack("=I", n & 0xffffffff), HEAD_BEAT)
            time.sleep(0.1)

    def stop(self):
        self.beats.clear()

    def set_prefixes(self, prefixes, port=0, peer=0):
        """Sets the server addresses that a peer may use as its source addresses."""
        def packed(text):
            net = ipaddress.ip_network(text)
            mapped = b"\0" * 10 + b"\xff\xff" if net.version == 4 else b""
            return struct.pack("=16sBB", mapped + net.network_address.packed, 8 * len(mapped) + net.prefixlen, 0) + \
                struct.pack("!H", port)

        data = struct.pack("=I", len(prefixes)) + b"".join(map(packed, prefixes))
        os.pwrite(self.board, data, self.peer_at(peer) + PEER_PREFIXES)

    def set_peer_state(self, state):
        os.pwrite(self.board, struct.pack("=I", state), self.peer_at(0) + 4)

    def accept(self):
        while True:
            try:
                s, _ = self.listener.accept()
            except OSError:
                return
            self.connections.append(s)
            threading.Thread(target=self.talk, args=(s,), daemon=True).start()

    def talk(self, s):
        while True:
            if s in self.offering:
                self.takes_offers.wait()
            try:
                data, fds, _, _ = socket.recv_fds(s, 4096, 4)
            except OSError:
                return
            if not data:
                return
            while data:
                kind, size = struct.unpack_from("=II", data)
                assert 8 <= size <= len(data), (kind, size, len(data))
                self.message(s, kind, data[:size], fds)
                data = data[size:]

    def message(self, s, kind, data, fds):
        if kind == HELLO:
            self.welcome(s, struct.unpack_from("=IIII", data)[3])
        elif kind == OFFER:
            _, _, peer, flags, number, offset, length, tag, trace, mtime, size = struct.unpack(OFFER_FORMAT, data)
            st = os.fstat(fds[0])
            assert (st.st_mtime_ns, st.st_size) == (mtime, size) or flags & OFFER_BODY
            self.flags.append(flags)
            with self.changed:
                self.offers[number] = (fds[0], offset, length, tag)
                self.on_offer(number, trace.hex())
                self.changed.notify_all()
        elif kind == HANDOFF:
            f = struct.unpack(HANDOFF_FORMAT, data)
            names = "kind size peer epoch bytes pad0 handoff offer length rate tag trace client_address server_address client_port " \
                "server_port start rcv_nxt tsval ts_recent snd_wnd snd_cwnd snd_ssthresh srtt_us ack_spacing ahead token mss snd_wscale rcv_wscale " \
                "options first pad tls_suite tls_content_bytes tls_skip tls_pad tls_record tls_iv tls_key".split()
            h = dict(zip(names, f))
            h["handoff"] |= self.ring_of.get(s, 0) << 64
            self.note("handoff", h)
            if h["options"] & OPTION_DIGEST:
                self.on_digest(s, h["handoff"], h["offer"])
            threading.Thread(target=self.on_handoff, args=(s, h), daemon=True).start()
        elif kind == PROVE:
            _, _, peer, _, handoff, offer, length, tag = struct.unpack("=IIIIQQQ16s", data)
            self.note("prove", (peer, offer, length, tag))
            self.on_digest(s, handoff, offer)
        elif kind == WITHDRAWN:
            _, _, peer, _, handoff = struct.unpack("=IIIIQ", data)
            self.note("withdrawn", (peer, self.ring_of.get(s, 0) << 64 | handoff))
        elif kind == FETCH:
            _, _, peer, _, fetch, offer, length, tag, _ = struct.unpack(FETCH_FORMAT, data)
            self.note("fetch", fetch)
            threading.Thread(target=self.on_fetch, args=(s, fetch, offer, length), daemon=True).start()
        elif kind == ABORT:
            self.note("abort", self.ring_of.get(s, 0) << 64 | struct.unpack_from("=Q", data, 8)[0])

    def note(self, *message):
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def wait(self, kind, timeout=PATIENCE):
        """Waits for a message of this kind, removes it, and returns its contents."""
        end = time.time() + timeout
        with self.changed:
            while True:
                for m in self.messages:
                    if m[0] == kind:
                        self.messages.remove(m)
                        return m[1]
                if not self.changed.wait(max(0, end - time.time())) and time.time() >= end:
                    raise TimeoutError(f"no {kind}")

    def welcome(self, s, channel):
        number = next(self.numbers)
        if channel == OFFERS:
            self.offering.add(s)
        counters = os.memfd_create("counters")
        os.ftruncate(counters, COUNTERS_BYTES)
        self.counter_maps.append(mmap.mmap(counters, COUNTERS_BYTES))
        fds = [self.board, counters]
        ring = 0xffffffff
        if channel == CONTROL and self.ring:
            ring = self.ring_of[s] = self.ring.add()
            fds.append(self.ring.rings[ring].map)
        welcome = struct.pack("=IIIIIIQ", WELCOME, self.welcome_bytes, number, ring, VERSION, 0, 0) + b"\xff" * self.wider
        socket.send_fds(s, [welcome[:self.welcome_bytes]], fds)
        os.close(counters)
        with self.changed:  # several threads change this number
            self.workers += 1

    def counters(self):
        total = lambda index: sum(struct.unpack_from("=Q", m, 8 * index)[0] for m in self.counter_maps)
        return {name: total(index) for name, index in COUNTERS.items()}

    def handoffs(self):
        """Number of handoffs that are not over, as the workers count them."""
        return sum(sum(struct.unpack_from(f"={PEERS}I", m, 64 * 8)) for m in self.counter_maps)

    def shim_loop(self):
        while True:
            data, fds, _, at = socket.recv_fds(self.shim, 4096, 4)
            what, _, ring, handoff, length = struct.unpack_from("=iIIQQ", data)
            handoff |= ring << 64
            if what == WATCH:
                with socket.socket(fileno=fds[0]) as s:
                    self.note("watch", s.getsockname())
                self.shim.sendto(b".", at)
                continue
            if what == BEGIN and (refusal := self.refusal(handoff)):
                state = bytearray(data[28:])
                struct.pack_into("=I", state, 20, refusal)
                self.ring.rings[ring].write(bytes(state), NO_WAKEUP)
                self.shim.sendto(b"-", at)
                os.close(fds[0])
                continue
            if what == BEGIN:
                self.before_answer(handoff, fds[0])
            if what in (BEGIN, STATE, MOVE) and self.ring and not self.is_answer_lost():
                self.ring.rings[ring].write(data[28:], NO_WAKEUP)  # wakes no worker, as with the steering programs
            if what == BEGIN:
                self.on_begin(handoff)
            self.shim.sendto(b".", at)
            if what == STATE:
                os.close(fds[0])
            elif what in (BEGIN, MOVE):
                with self.changed:
                    self.close_copies(fds[0])
                    self.sockets[handoff] = fds[0]
                    self.changed.notify_all()
            else:
                os.close(fds[0])
                if handoff in self.sockets:  # with an open copy, nginx's close sends no reset
                    os.close(self.sockets.pop(handoff))
                self.note("cancel", handoff)

    def close_copies(self, fd):
        """Closes the copies of nginx's socket for a client that came with earlier handoffs. As long as a copy is open,
        nginx's close sends no reset."""
        def ends(fd):
            with socket.socket(fileno=os.dup(fd)) as s:
                try:
                    return s.getpeername()
                except OSError:  # the connection was reset
                    return None

        for handoff in [h for h, other in self.sockets.items() if ends(other) == ends(fd)]:
            os.close(self.sockets.pop(handoff))

    def client_socket(self, handoff):
        with self.changed:
            self.changed.wait_for(lambda: handoff in self.sockets, PATIENCE)
            return socket.socket(fileno=self.sockets.pop(handoff))

    def payload(self, number, part=1.0):
        with self.changed:  # HANDOFF comes by another connection, perhaps before the offer
            self.changed.wait_for(lambda: number in self.offers, PATIENCE)
            fd, offset, length, tag = self.offers[number]
        return os.pread(fd, int(length * part), offset)

    # ---- how handoffs and fetches are served ----

    def serve(self, s, h):
        c = self.client_socket(h["handoff"])
        data = self.payload(h["offer"])
        assert len(data) == h["length"]
        step = h["rate"] // 10 or len(data)
        for i in range(0, len(data), step):
            if i:
                time.sleep(0.1)
            self.write(c, data[i:i + step])
        wait_acked(c.fileno())
        self.ring.post(h["handoff"], len(data), COMPLETE)
        c.close()

    @staticmethod
    def write(c, data):
        view = memoryview(data)
        while view:
            try:
                n = c.send(view)
                view = view[n:]
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                return

    def deliver(self, c, data):
        """Sends bytes to a client, and waits until it has acknowledged them."""
        self.write(c, data)
        wait_acked(c.fileno())

    def tell_digest(self, s, id, number, known=1, peer=0, wrong_by=0, add=b""):
        with self.changed:
            self.changed.wait_for(lambda: number in self.offers, PATIENCE)
            fd, offset, _, _ = self.offers[number]
        digest = hashlib.sha256(os.pread(fd, os.fstat(fd).st_size, 0) + add).digest()
        s.send(struct.pack("=IIQQII32s", DIGEST, 64, id & MASK, offset + wrong_by, peer, known, digest))

    def end(self, s, id, reason, peer=0xFFFFFFFF):
        with contextlib.suppress(OSError):  # the worker has left, or the test is over
            s.send(struct.pack("=IIQII", ENDED, 24, id & MASK, reason, peer))

    def serve_fetch(self, s, fetch, offer, length, part=1.0):
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        data = self.payload(offer, part)
        socket.send_fds(s, [struct.pack("=IIQQ", FETCHED, 24, fetch, length)], [theirs.fileno()])
        theirs.close()
        try:
            ours.sendall(data)
        except OSError:
            pass
        ours.close()
