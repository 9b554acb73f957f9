"""Reads a body for each client, and gives it to the client when that says so. Arguments: where it listens, who has the body, and
its length."""
import socket
import sys

from absent import address, body


def main():
    listens, of, length = sys.argv[1:]
    listener = socket.create_server(address(listens))
    buffer = bytearray(int(length) + 65536)
    while True:
        client, _ = listener.accept()
        path = client.recv(100).decode()
        whole = body(buffer, address(of), path, int(length))
        client.send(b"it is here")
        client.recv(1)
        try:
            client.sendall(whole)
        except OSError as error:
            print(path, error, flush=True)
        client.close()


main()
