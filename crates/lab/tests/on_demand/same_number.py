"""Writes the first half of a body to one client, closes this connection, and writes the second half to the next client,
whose connection gets the same descriptor number. In between, it does not wait for anything. Arguments: the address at
which it listens, the address of the server with the body, and the body's path and length."""
import select
import socket
import sys

from absent import address, body


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
