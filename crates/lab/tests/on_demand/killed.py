"""Writes the beginning of a body to a client, and hands off the rest (another machine is to send it). Then kills itself
at once, most often before the agent learns of the handoff.
Arguments: the address at which it listens, the address of the server with the body, and the body's path and length."""
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
    # In this time, the agent of the body's machine says that it sends to such clients.
    time.sleep(0.5)
    client.send(whole[8192:])
    os.kill(os.getpid(), signal.SIGKILL)


main()
