"""Sends a body three times, without looking at it, to a server that is not under `shunt run`. Arguments: the address at
which it listens, the address of the server with the body, the body's path and length, and the address of the server
that gets the body."""
import socket
import sys
import time

from absent import address, body


def main():
    listens, of, path, length, to = sys.argv[1:]
    listener = socket.create_server(address(listens))
    whole = body(bytearray(int(length) + 65536), address(of), path, int(length))
    with socket.create_connection(address(to)) as server:
        for _ in range(3):
            server.sendall(whole)
            time.sleep(0.5)
        server.shutdown(socket.SHUT_WR)
        assert server.recv(1) == b""
    listener.close()


main()
