"""For each client, reads the body whose path the client names. Writes this body to the client when the client has sent
another byte.
Arguments: the address at which it listens, the address of the server with the bodies, and the length of each body."""
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
