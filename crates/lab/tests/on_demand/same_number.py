"""Gives the first half of a body to one client and the second half to the next, which gets the first one's descriptor, all
in one turn: nothing is waited for in between. Arguments: where it listens, who has the body, its path and its length."""
import select
import socket
import sys


def address(text):
    host, port = text.rsplit(":", 1)
    return host, int(port)


def body(buffer, of, path, length):
    """Reads a body without a look at it; says where it begins."""
    upstream = socket.create_connection(of)
    upstream.sendall(f"GET {path} HTTP/1.1\r\nHost: body\r\n\r\n".encode())
    view = memoryview(buffer)
    begins, end = 0, 0
    while not begins:
        end += upstream.recv_into(view[end:], 4096)
        begins = bytes(view[:end]).find(b"\r\n\r\n") + 4 if b"\r\n\r\n" in bytes(view[:end]) else 0
    while end < begins + length:
        got = upstream.recv_into(view[end:])
        if not got:
            raise EOFError("the body is short")
        end += got
    upstream.close()
    return view[begins : begins + length]


def main():
    listens, of, path, length = sys.argv[1:]
    length = int(length)
    listener = socket.create_server(address(listens))
    buffer = bytearray(length + 65536)
    while True:
        first, _ = listener.accept()
        first.recv(4)
        whole = body(buffer, address(of), path, length)
        numbers, sent = [], []
        for half in (whole[: length // 2], whole[length // 2 :]):
            if not first:
                first, _ = listener.accept()
            first.setblocking(False)
            numbers.append(first.fileno())
            sent.append(first.send(half))
            first.close()
            first = None
        print(numbers, sent, flush=True)
        select.select([], [], [], 0)


main()
