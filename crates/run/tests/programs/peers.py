"""Two programs that talk over several connections in ways that a seed decides. Both know all bytes of both directions.
They compare each byte that they get, and fail where a byte differs or is missing, or where there are too many."""

import array
import fcntl
import os
import random
import select
import signal
import socket
import sys
import tempfile
import termios

CONNECTIONS = 6
GREETING = b"220 ready\r\n" + bytes(9000)
FIONREAD = termios.FIONREAD


def stream(seed, connection, direction):
    """Returns the bytes that one direction of a connection carries."""
    chooser = random.Random(f"{seed} {connection} {direction}")
    total = chooser.choice([0, 1, 15, 16, 17, 5000, 70_000, 300_000, 2_000_000])
    return chooser.randbytes(total)


def send_some(chooser, sock, data, at):
    """Sends some of data[at:]. Returns how many bytes."""
    size = min(len(data) - at, chooser.choice([1, 7, 100, 4096, 8192, 10_000, 65_536, 100_000, 1 << 20]))
    part = data[at:at + size]
    how = chooser.randrange(6)
    if how == 0:
        return os.write(sock.fileno(), part)
    if how == 1:
        cut = chooser.randrange(size + 1)
        return os.writev(sock.fileno(), [part[:cut], b"", part[cut:]])
    if how == 2:
        return sock.sendmsg([part[:size // 2], part[size // 2:]])
    if how == 3:
        with tempfile.TemporaryFile() as file:
            file.write(data[:at + size])
            file.flush()
            return os.sendfile(sock.fileno(), file.fileno(), at, size)
    if how == 4:
        copy = os.dup(sock.fileno())
        try:
            return os.write(copy, part)
        finally:
            os.close(copy)
    return sock.send(part)


def receive_some(chooser, sock, buffer, expected, at):
    """Receives some bytes and compares them with expected[at:]. Returns how many: 0 at the end of the stream, -1 if it
    took none, because it only looked at them (MSG_PEEK) or none was there (FIONREAD)."""
    size = chooser.choice([1, 8, 100, 4096, 8192, 65_536, 65_536, 262_144])
    how = chooser.randrange(7)
    if how == 0:
        there = array.array("i", [0])
        fcntl.ioctl(sock.fileno(), FIONREAD, there)
        seen = sock.recv(size, socket.MSG_PEEK)
        assert seen == expected[at:at + len(seen)], f"peeked bytes differ at {at}"
        assert len(seen) >= min(size, there[0]), f"of {there[0]} bytes a look for {size} shows {len(seen)}"
        return -1 if seen else 0
    if how == 1:
        there = array.array("i", [0])
        fcntl.ioctl(sock.fileno(), FIONREAD, there)
        assert there[0] <= len(expected) - at, f"FIONREAD says {there[0]} of {len(expected) - at}"
        if there[0] > 0:
            got = sock.recv(there[0], socket.MSG_DONTWAIT | socket.MSG_WAITALL)
            assert len(got) == there[0], f"FIONREAD said {there[0]}, {len(got)} came"
            assert got == expected[at:at + len(got)], f"bytes differ at {at}"
            return len(got)
        return -1
    if how == 2:
        offset = chooser.choice([0, 0, 1, 32, 4000])
        view = memoryview(buffer)[offset:offset + size]
        got = sock.recv_into(view)
        if chooser.randrange(2):
            # This program writes the bytes into a file before it looks at them in the buffer.
            with tempfile.TemporaryFile() as file:
                file.write(view[:got])
                file.seek(0)
                assert file.read() == expected[at:at + got], f"bytes written to a file differ at {at}"
        assert view[:got] == expected[at:at + got], f"bytes differ at {at}"
        return got
    if how == 3:
        views = [memoryview(buffer)[:size // 3], memoryview(buffer)[300_000:300_000 + size]]
        got = os.readv(sock.fileno(), views)
        first = min(got, size // 3)
        assert views[0][:first] == expected[at:at + first], f"bytes differ at {at}"
        assert views[1][:got - first] == expected[at + first:at + got], f"bytes differ at {at + first}"
        return got
    if how == 4:
        got = sock.recvmsg(size)[0]
    elif how == 5:
        got = os.read(sock.fileno(), size)
    else:
        got = sock.recv(size)
    assert got == expected[at:at + len(got)], f"bytes differ at {at}"
    return len(got)


def fork_check(sock, buffer):
    """Checks that a child sees the bytes that its parent has received."""
    before = bytes(buffer[:200_000])
    child = os.fork()
    if child == 0:
        os._exit(0 if bytes(buffer[:200_000]) == before else 1)
    assert os.waitpid(child, 0)[1] == 0, "the child of a fork sees other bytes"


def talk(chooser, connections, incoming, outgoing):
    """Talks over all connections at once, nonblocking, until both directions of each have ended."""
    sent, received = [0] * len(connections), [0] * len(connections)
    open_for_sending = set(range(len(connections)))
    open_for_receiving = set(range(len(connections)))
    buffers = [bytearray(700_000) for _ in connections]
    poller = select.epoll()
    for number, sock in enumerate(connections):
        sock.setblocking(False)
        poller.register(sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
    by_fd = {sock.fileno(): number for number, sock in enumerate(connections)}
    while open_for_sending or open_for_receiving:
        events = poller.poll(20)
        assert events, f"20 s without an event: sent {sent}, received {received}, {open_for_receiving}"
        for fd, happened in events:
            number = by_fd[fd]
            sock = connections[number]
            if number in open_for_sending and happened & select.EPOLLOUT:
                try:
                    if sent[number] < len(outgoing[number]):
                        sent[number] += send_some(chooser, sock, outgoing[number], sent[number])
                    else:
                        sock.shutdown(socket.SHUT_WR)
                        open_for_sending.discard(number)
                except BlockingIOError:
                    pass
            if number in open_for_receiving and happened & (select.EPOLLIN | select.EPOLLHUP):
                try:
                    got = receive_some(chooser, sock, buffers[number], incoming[number], received[number])
                    if got == 0:
                        assert received[number] == len(incoming[number]), \
                            f"the end after {received[number]} of {len(incoming[number])}"
                        open_for_receiving.discard(number)
                    elif got > 0:
                        received[number] += got
                except BlockingIOError:
                    pass
            wanted = (select.EPOLLIN if number in open_for_receiving else 0) \
                | (select.EPOLLOUT if number in open_for_sending else 0)
            poller.modify(fd, wanted)
        if chooser.randrange(500) == 0:
            fork_check(connections[0], buffers[0])


def main():
    role, port, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    chooser = random.Random(f"{role} {seed}")
    signal.alarm(120)
    if role == "serve":
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(16)
        accepted = {}
        while len(accepted) < CONNECTIONS:
            sock = listener.accept()[0]
            if seed % 2:
                # This end speaks first, before anything has come.
                sock.sendall(GREETING)
            number = sock.recv(1, socket.MSG_WAITALL)[0]
            accepted[number] = sock
        connections = [accepted[number] for number in range(CONNECTIONS)]
        incoming, outgoing = "request", "response"
    else:
        connections = []
        for number in range(CONNECTIONS):
            for _ in range(1000):
                sock = socket.socket()
                try:
                    sock.connect(("127.0.0.1", port))
                    break
                except ConnectionRefusedError:
                    sock.close()
                    select.select([], [], [], 0.01)
            if seed % 2:
                assert sock.recv(len(GREETING), socket.MSG_WAITALL) == GREETING
            sock.sendall(bytes([number]))
            connections.append(sock)
        incoming, outgoing = "response", "request"
    talk(chooser, connections,
         [stream(seed, number, incoming) for number in range(CONNECTIONS)],
         [stream(seed, number, outgoing) for number in range(CONNECTIONS)])


main()
