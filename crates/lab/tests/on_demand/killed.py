"""Gives a client the beginning of a body, hands off the rest, and ends before the agent learns of the handoff. Arguments: where
it listens, who has the body, its path and its length."""
import os
import signal
import socket
import sys
import time

from absent import address, body


def main():
    listens, of, path, length = sys.argv[1:]
    listener = socket.create_server(address(listens))
    client, _ = listener.accept()
    client.recv(2)
    whole = body(bytearray(int(length) + 65536), address(of), path, int(length))
    client.setblocking(False)
    assert client.send(whole[:8192]) == 8192
    # Long enough for the body's machine to say that it sends to such clients.
    time.sleep(0.5)
    client.send(whole[8192:])
    os.kill(os.getpid(), signal.SIGKILL)


main()
